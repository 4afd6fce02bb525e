//! Wraps system calls that libc makes inside itself.
//!
//! malloc grows by calls that never pass the symbol table, and fork's child runs libc code before any handler could
//! run, so interposing symbols is not enough. Each function concerned makes its call with the seven bytes
//! `mov eax, NR; syscall`. They become `call thunk; nop`, and the thunk makes the call and tells the agent. Only that
//! exact pattern is patched; if it is missing, the caller is told. The thunks preserve every register that a system
//! call preserves.

use crate::near;
use crate::symbols::Libc;
use core::arch::global_asm;
use core::ffi::CStr;
use uzswap_pager::frames::arena::PAGE;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

global_asm!(
    // Saves what a system call preserves but a Rust function does not, and aligns the stack for the call.
    ".macro UZ_SAVE",
    "push rbp", "mov rbp, rsp",
    "push rdi", "push rsi", "push rdx", "push r10", "push r8", "push r9", "push rax", "push rbx",
    "sub rsp, 512", "and rsp, -16", "fxsave64 [rsp]",
    ".endm",
    ".macro UZ_RESTORE",
    "fxrstor64 [rsp]", "lea rsp, [rbp - 64]",
    "pop rbx", "pop rax", "pop r9", "pop r8", "pop r10", "pop rdx", "pop rsi", "pop rdi",
    "pop rbp",
    ".endm",
    // clone, as fork calls it (no new stack).
    ".globl uz_thunk_clone", "uz_thunk_clone:",
    "UZ_SAVE", "call {before_fork}", "UZ_RESTORE",
    "mov eax, 56", "syscall",
    "UZ_SAVE", "mov rdi, rax", "call {after_fork}", "UZ_RESTORE",
    "ret",
    // execve. If the program needs another environment, there is room for it on the stack; the answer that says what to
    // do has the size as well. (If execve returns, nothing of that is used any more.)
    ".globl uz_thunk_execve", "uz_thunk_execve:",
    "push rdx", "push rbp", "mov rbp, rsp",
    "UZ_SAVE", "mov rsi, rdi", "mov rdi, rdx", "call {asks}", "mov [rbp - 56], rax", "UZ_RESTORE",
    "test rax, rax", "jz 2f",
    "mov rcx, rax", "and rcx, {room}", "sub rsp, rcx",
    "UZ_SAVE", "mov rdi, rdx", "lea rsi, [rbp + 8]", "mov rdx, rax", "call {environment}", "mov [rbp - 24], rax", "UZ_RESTORE",
    "2:",
    "mov eax, 59", "syscall",
    "UZ_SAVE", "call {goes_on}", "UZ_RESTORE",
    "mov rsp, rbp", "pop rbp", "pop rdx",
    "ret",
    // An ordered call: 16 bytes on the stack carry its state from `begin` to `end`.
    ".macro UZ_ORDERED nr",
    "lea rsp, [rsp - 16]",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "mov esi, \\nr", "mov rcx, r10", "call {begin}", "UZ_RESTORE",
    "mov eax, \\nr", "syscall",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "call {end}", "UZ_RESTORE",
    "lea rsp, [rsp + 16]",
    ".endm",
    // mmap, for which the kernel may get other flags.
    ".globl uz_thunk_mmap", "uz_thunk_mmap:",
    "push r10",
    "test r10d, {populate}", "jz 2f",
    "UZ_SAVE", "mov edi, edx", "mov esi, r10d", "call {flags_of_mmap}", "mov eax, eax", "mov [rbp - 32], rax", "UZ_RESTORE",
    "2:",
    "UZ_ORDERED 9",
    "pop r10",
    "UZ_SAVE", "mov rdi, rax", "mov rcx, r10", "call {after_mmap}", "UZ_RESTORE",
    "ret",
    ".globl uz_thunk_brk", "uz_thunk_brk:",
    "UZ_ORDERED 12",
    "UZ_SAVE", "mov rdi, rax", "call {after_brk}", "UZ_RESTORE",
    "ret",
    ".globl uz_thunk_munmap", "uz_thunk_munmap:",
    "UZ_ORDERED 11",
    "ret",
    ".globl uz_thunk_mremap", "uz_thunk_mremap:",
    "UZ_SAVE", "mov rcx, r10", "call {mremap}", "mov [rbp - 56], rax", "UZ_RESTORE",
    "ret",
    ".globl uz_thunk_madvise", "uz_thunk_madvise:",
    "lea rsp, [rsp - 16]",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "mov esi, 28", "mov rcx, r10", "call {begin}", "UZ_RESTORE",
    "mov eax, 28", "syscall",
    "UZ_SAVE", "mov r8, rax", "mov rcx, rdx", "mov rdx, rsi", "mov rsi, rdi", "lea rdi, [rbp + 8]",
    "call {end_madvise}", "UZ_RESTORE",
    "lea rsp, [rsp + 16]",
    "ret",
    asks = sym crate::environment::asks,
    environment = sym crate::environment::completed,
    room = const crate::environment::ROOM,
    before_fork = sym crate::before_fork,
    after_fork = sym crate::after_fork,
    after_mmap = sym crate::populated::after_mmap,
    flags_of_mmap = sym crate::populated::flags_of_mmap,
    populate = const libc::MAP_POPULATE,
    after_brk = sym crate::after_brk,
    goes_on = sym crate::environment::goes_on,
    begin = sym crate::calls::begin,
    end = sym crate::calls::end,
    mremap = sym crate::remap::mremap,
    end_madvise = sym crate::calls::end_madvise,
);

unsafe extern "C" {
    fn uz_thunk_clone();
    fn uz_thunk_execve();
    fn uz_thunk_mmap();
    fn uz_thunk_brk();
    fn uz_thunk_munmap();
    fn uz_thunk_mremap();
    fn uz_thunk_madvise();
}

/// Why libc could not be patched.
#[derive(Debug)]
pub enum PatchError {
    /// A function's code has no `mov eax, NR; syscall`.
    Pattern,
    /// No memory near libc, or its code cannot be made writable.
    Memory(#[allow(dead_code)] Errno),
}

/// Most functions that are wrapped.
const MOST: usize = 7;
/// Bytes from one jump of the page to the next.
const JUMP: usize = 16;

/// A system call in libc's code, and the thunk that replaces it.
#[derive(Clone, Copy)]
struct Site {
    at: usize,
    thunk: usize,
}

/// Wraps `_Fork`, `execve`, `mmap`, `brk`, `munmap`, `mremap` and `madvise` of libc. Every process pays for this when
/// it starts, so all of them share a page of jumps, and libc's code is made writable only once.
///
/// # Errors
/// [`PatchError`]; then nothing was changed.
///
/// # Safety
/// No other thread may run in libc meanwhile (a preload constructor).
pub unsafe fn install() -> Result<(), PatchError> {
    let libc = Libc::find().ok_or(PatchError::Pattern)?;
    let needed: [(&CStr, u32, usize); MOST - 1] = [
        (c"_Fork", 56, uz_thunk_clone as *const () as usize),
        (c"mmap64", 9, uz_thunk_mmap as *const () as usize),
        (c"brk", 12, uz_thunk_brk as *const () as usize),
        (c"munmap", 11, uz_thunk_munmap as *const () as usize),
        (c"mremap", 25, uz_thunk_mremap as *const () as usize),
        (c"madvise", 28, uz_thunk_madvise as *const () as usize),
    ];
    let mut sites = [Site { at: 0, thunk: 0 }; MOST];
    for (site, (name, nr, thunk)) in sites.iter_mut().zip(needed) {
        *site = Site { at: call_in(&libc, name, nr)?, thunk };
    }
    // If it cannot be wrapped, programs start with the environment that they are given.
    let n = match call_in(&libc, c"execve", 59) {
        Ok(at) => {
            sites[MOST - 1] = Site { at, thunk: uz_thunk_execve as *const () as usize };
            MOST
        }
        Err(_) => MOST - 1,
    };
    // SAFETY: no other thread runs in libc, as the caller promises; each site is such a call, and the thunks preserve
    // what a system call preserves.
    unsafe { redirect(&sites[..n]) }
}

/// Where function `name` of `libc` makes system call `nr`.
fn call_in(libc: &Libc, name: &CStr, nr: u32) -> Result<usize, PatchError> {
    let f = libc.symbol(name);
    if f == 0 {
        return Err(PatchError::Pattern);
    }
    let mut pattern = [0xb8, 0, 0, 0, 0, 0x0f, 0x05];
    pattern[1..5].copy_from_slice(&nr.to_le_bytes());
    // SAFETY: libc's text extends further than this behind each of its functions.
    let code = unsafe { core::slice::from_raw_parts(f as *const u8, 160) };
    code.windows(7).position(|w| w == pattern).map(|i| f + i).ok_or(PatchError::Pattern)
}

/// Redirects the calls at `sites` to their thunks.
///
/// # Safety
/// No other thread may run there. At each site there must be such a call, all in one mapping, and each thunk must
/// preserve every register that a system call preserves.
unsafe fn redirect(sites: &[Site]) -> Result<(), PatchError> {
    let first = sites.iter().map(|site| site.at).min().unwrap_or(0) & !(PAGE - 1);
    let end = sites.iter().map(|site| site.at + 7).max().unwrap_or(0).next_multiple_of(PAGE);
    let jumps = jumps(sites, first, end)?;
    let set = |prot: i32| {
        // SAFETY: the pages are libc's text, which stays executable throughout.
        unsafe { sys!(libc::SYS_mprotect, first, end - first, prot) }.map_err(PatchError::Memory)
    };
    set(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    for (site, jump) in sites.iter().zip((jumps..).step_by(JUMP)) {
        let mut new = [0xe8, 0, 0, 0, 0, 0x66, 0x90];
        new[1..5].copy_from_slice(&(jump.wrapping_sub(site.at + 5) as u32).to_le_bytes());
        // SAFETY: writable now, and nobody runs it (see install).
        unsafe { core::ptr::copy_nonoverlapping(new.as_ptr(), site.at as *mut u8, 7) };
    }
    set(libc::PROT_READ | libc::PROT_EXEC)?;
    Ok(())
}

/// A page of jumps to the thunks of `sites`, in their order, within reach of everything from `first` to `end`.
fn jumps(sites: &[Site], first: usize, end: usize) -> Result<usize, PatchError> {
    let at = near::page(first, end).map_err(PatchError::Memory)?;
    for (site, jump) in sites.iter().zip((at..).step_by(JUMP)) {
        let mut code = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        code[6..].copy_from_slice(&site.thunk.to_le_bytes());
        // SAFETY: a fresh page of ours, in which there is room for all of them.
        unsafe { core::ptr::copy_nonoverlapping(code.as_ptr(), jump as *mut u8, code.len()) };
    }
    // SAFETY: a page of ours.
    unsafe { sys!(libc::SYS_mprotect, at, PAGE, libc::PROT_READ | libc::PROT_EXEC) }.map_err(PatchError::Memory)?;
    Ok(at)
}
