//! Parts of the library that can be tested alone, each by the tests in its file. (The library as a whole is made to be preloaded:
//! its allocator works only in its reservation, and it has functions of libc's names.)

#[path = "../../src/bytes.rs"]
mod bytes;
#[path = "../../src/futexes.rs"]
mod futexes;
#[path = "../../src/heap.rs"]
mod heap;
#[path = "../../src/near.rs"]
mod near;
#[path = "../../src/parts.rs"]
mod parts;
#[path = "../../src/sites.rs"]
mod sites;
#[path = "../../src/symbols.rs"]
mod symbols;
