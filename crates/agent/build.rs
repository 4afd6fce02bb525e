//! How the library is linked: a debugger that looks for a name of the program's must not find a function in it.
//!
//! A debugger puts its breakpoints into all functions of a name, inlined ones included, and it does not handle uzswap's threads:
//! one that hits a breakpoint ends the program (SIGTRAP). So `break write` ended programs, as uzswap has functions called
//! `write`; so would the name of any zstd function in a program that has zstd itself.
//!
//! So release builds of the library are stripped, unless `UZSWAP_SYMBOLS` is set, to look into them. And the functions that the
//! compiler calls to copy bytes are the library's own: `__wrap_memcpy` for `memcpy` (`bytes`).

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
