//! Copying, clearing and comparing bytes: libc's own functions, whoever else has some of these names.
//!
//! The compiler calls `memcpy` and its kin, also in uzswap's threads and while the pager's lock is held. Sanitizers put theirs
//! before libc's, which look at shadow memory of the program's, in which pages may be out: the ticker of a program built with
//! AddressSanitizer waited for itself when it engaged, and the program for ever. So the names are defined here, hidden (the
//! program does not see them), and lead to what libc has; before that is found, to plain instructions.

use crate::symbols::Libc;
use core::arch::global_asm;
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

global_asm!(
    ".macro UZ_BYTES name at",
    ".hidden \\name", ".globl \\name", ".type \\name, @function",
    "\\name:", "jmp qword ptr [rip + {table} + \\at]",
    ".size \\name, . - \\name",
    ".endm",
    "UZ_BYTES memcpy 0", "UZ_BYTES memmove 8", "UZ_BYTES memset 16", "UZ_BYTES memcmp 24", "UZ_BYTES bcmp 32", "UZ_BYTES strlen 40",
    ".purgem UZ_BYTES",
    "uz_memmove:",
    "mov rax, rdi", "mov rcx, rdx", "sub rdi, rsi", "cmp rdi, rdx", "mov rdi, rax", "jb 2f",
    "rep movsb", "ret",
    "2:", "lea rdi, [rdi + rdx - 1]", "lea rsi, [rsi + rdx - 1]", "std", "rep movsb", "cld", "ret",
    "uz_memset:",
    "mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret",
    "uz_memcmp:",
    "xor eax, eax", "mov rcx, rdx", "test rcx, rcx", "jz 2f", "repe cmpsb", "je 2f",
    "movzx eax, byte ptr [rdi - 1]", "movzx ecx, byte ptr [rsi - 1]", "sub eax, ecx",
    "2:", "ret",
    "uz_strlen:",
    "xor eax, eax",
    "2:", "cmp byte ptr [rdi + rax], 0", "je 3f", "inc rax", "jmp 2b",
    "3:", "ret",
    table = sym TABLE,
);

unsafe extern "C" {
    fn uz_memmove();
    fn uz_memset();
    fn uz_memcmp();
    fn uz_strlen();
}

/// Where the names above lead to, in their order.
static TABLE: [AtomicPtr<c_void>; 6] =
    [at(uz_memmove), at(uz_memmove), at(uz_memset), at(uz_memcmp), at(uz_memcmp), at(uz_strlen)];

const fn at(function: unsafe extern "C" fn()) -> AtomicPtr<c_void> {
    AtomicPtr::new(function as *const () as *mut c_void)
}

/// Finds what libc has, in the constructor.
pub fn init(libc: &Libc) {
    let names: [&CStr; 6] = [c"memcpy", c"memmove", c"memset", c"memcmp", c"bcmp", c"strlen"];
    for (place, name) in TABLE.iter().zip(names) {
        let found = libc.symbol(name);
        if found != 0 {
            place.store(found as *mut c_void, Relaxed);
        }
    }
}
