//! Parts of the library that stand alone, each with the tests that its file has. (The library itself is for being preloaded: it
//! has an allocator that works in its reservation only, and functions of libc's names.)

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
#[path = "../../src/symbols.rs"]
mod symbols;
