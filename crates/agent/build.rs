//! How the library is linked: no function in it may be found by a name of the program's.
//!
//! A debugger writes its breakpoints into all functions of a name, also those that the compiler has inlined, and it does not have
//! uzswap's threads: one that meets a breakpoint ends the program (SIGTRAP). So `break write` ended programs, as uzswap has functions
//! called `write`, and so would the name of any function of zstd's in a program that has zstd itself.
//!
//! So the library is stripped, but for what is built to be looked into (profile `dev`, or `UZSWAP_SYMBOLS=1`). And what the compiler calls
//! to copy bytes is the library's own, `__wrap_memcpy` for `memcpy` (`bytes`).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=UZSWAP_SYMBOLS");
    for name in ["memcpy", "memmove", "memset", "memcmp", "bcmp", "strlen"] {
        println!("cargo::rustc-link-arg-cdylib=-Wl,--wrap={name}");
    }
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "release")
        && std::env::var_os("UZSWAP_SYMBOLS").is_none()
    {
        println!("cargo::rustc-link-arg-cdylib=-Wl,--strip-all");
    }
}
