//! Wrapping system calls that libc makes inside itself.
//!
//! malloc grows by calls that never pass the symbol table, and fork's child runs libc code before any handler could
//! run, so interposing symbols is not enough. Each function concerned makes its call with the seven bytes
//! `mov eax, NR; syscall`; they become `call thunk; nop`, and the thunk makes the call and tells the agent. Only that
//! exact pattern is patched; where it is missing the caller is told. The thunks keep every register that a system call
//! keeps.

use crate::symbols::Libc;
use core::arch::global_asm;
use core::ffi::CStr;
use uzswap_sys::raw::Errno;
use uzswap_sys::sys;

global_asm!(
    // Saves what a system call preserves but a Rust function does not. The stack is aligned for the call.
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
    // clone, as fork makes it (no new stack).
    ".globl uz_thunk_clone", "uz_thunk_clone:",
    "UZ_SAVE", "call {before_fork}", "UZ_RESTORE",
    "mov eax, 56", "syscall",
    "UZ_SAVE", "mov rdi, rax", "call {after_fork}", "UZ_RESTORE",
    "ret",
    // execve, with room on the stack for another environment (when it returns nothing of it is used any more).
    ".globl uz_thunk_execve", "uz_thunk_execve:",
    "push rdx", "push rbp", "mov rbp, rsp", "sub rsp, {environment_bytes}",
    "UZ_SAVE", "mov rdi, rdx", "lea rsi, [rbp + 8]", "call {environment}", "mov [rbp - 24], rax", "UZ_RESTORE",
    "mov eax, 59", "syscall",
    "mov rsp, rbp", "pop rbp", "pop rdx",
    "ret",
    // A call that is kept in order: 16 bytes of the stack say how it is, between what begins and what ends it.
    ".macro UZ_ORDERED nr",
    "lea rsp, [rsp - 16]",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "mov esi, \\nr", "mov rcx, r10", "call {begin}", "UZ_RESTORE",
    "mov eax, \\nr", "syscall",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "call {end}", "UZ_RESTORE",
    "lea rsp, [rsp + 16]",
    ".endm",
    ".globl uz_thunk_mmap", "uz_thunk_mmap:",
    "UZ_ORDERED 9",
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
    "lea rsp, [rsp - 16]",
    "UZ_SAVE", "mov r8, r10", "mov rcx, rdx", "mov rdx, rsi", "mov rsi, rdi", "lea rdi, [rbp + 8]",
    "call {begin_mremap}", "UZ_RESTORE",
    "mov eax, 25", "syscall",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "mov rsi, rax", "call {end_mremap}", "UZ_RESTORE",
    "lea rsp, [rsp + 16]",
    "ret",
    ".globl uz_thunk_madvise", "uz_thunk_madvise:",
    "lea rsp, [rsp - 16]",
    "UZ_SAVE", "lea rdi, [rbp + 8]", "mov esi, 28", "mov rcx, r10", "call {begin}", "UZ_RESTORE",
    "mov eax, 28", "syscall",
    "UZ_SAVE", "mov r8, rax", "mov rcx, rdx", "mov rdx, rsi", "mov rsi, rdi", "lea rdi, [rbp + 8]",
    "call {end_madvise}", "UZ_RESTORE",
    "lea rsp, [rsp + 16]",
    "ret",
    environment = sym crate::environment::completed,
    environment_bytes = const size_of::<crate::environment::Room>(),
    before_fork = sym crate::before_fork,
    after_fork = sym crate::after_fork,
    after_mmap = sym crate::after_mmap,
    after_brk = sym crate::after_brk,
    begin = sym crate::calls::begin,
    end = sym crate::calls::end,
    begin_mremap = sym crate::calls::begin_mremap,
    end_mremap = sym crate::calls::end_mremap,
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

/// Why a function could not be wrapped.
#[derive(Debug)]
pub enum PatchError {
    /// Its code has no `mov eax, NR; syscall`.
    Pattern,
    /// No memory near libc, or its code cannot be made writable.
    Memory(#[allow(dead_code)] Errno),
}

/// Wraps `_Fork`, `execve`, `mmap`, `brk`, `munmap`, `mremap` and `madvise` of libc.
///
/// # Errors
/// [`PatchError`]; then nothing was changed in the function concerned.
///
/// # Safety
/// No other thread may run in libc meanwhile (a preload constructor).
pub unsafe fn install() -> Result<(), PatchError> {
    let Some(libc) = Libc::find() else { return Err(PatchError::Pattern) };
    // SAFETY: as the caller says; the names are functions of libc.
    unsafe {
        crate::bytes::init(&libc);
        // (Where it cannot be wrapped a program is started with the environment that it is given.)
        let _ = wrap(&libc, c"execve", 59, uz_thunk_execve as *const () as usize);
        wrap(&libc, c"_Fork", 56, uz_thunk_clone as *const () as usize)?;
        wrap(&libc, c"mmap64", 9, uz_thunk_mmap as *const () as usize)?;
        wrap(&libc, c"brk", 12, uz_thunk_brk as *const () as usize)?;
        wrap(&libc, c"munmap", 11, uz_thunk_munmap as *const () as usize)?;
        wrap(&libc, c"mremap", 25, uz_thunk_mremap as *const () as usize)?;
        wrap(&libc, c"madvise", 28, uz_thunk_madvise as *const () as usize)
    }
}

/// Makes the system call `nr` in the function `name` of `libc` go to `thunk`.
///
/// # Safety
/// As [`install`]; `thunk` keeps every register that a system call keeps.
unsafe fn wrap(libc: &Libc, name: &CStr, nr: u32, thunk: usize) -> Result<(), PatchError> {
    let f = libc.symbol(name);
    if f == 0 {
        return Err(PatchError::Pattern);
    }
    let mut pattern = [0xb8, 0, 0, 0, 0, 0x0f, 0x05];
    pattern[1..5].copy_from_slice(&nr.to_le_bytes());
    // SAFETY: libc's text goes on for more than this after any of its functions.
    let code = unsafe { core::slice::from_raw_parts(f as *const u8, 160) };
    let site = f + code.windows(7).position(|w| w == pattern).ok_or(PatchError::Pattern)?;
    let stub = near(site, thunk)?;
    let mut new = [0xe8, 0, 0, 0, 0, 0x66, 0x90];
    new[1..5].copy_from_slice(&((stub as isize - (site as isize + 5)) as i32).to_le_bytes());
    let start = site & !4095;
    let len = (site + 7).next_multiple_of(4096) - start;
    let set = |prot: i32| {
        // SAFETY: the pages are libc's text, which stays executable throughout.
        unsafe { sys!(libc::SYS_mprotect, start, len, prot) }.map_err(PatchError::Memory)
    };
    set(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    // SAFETY: writable now, and nobody runs it (see install).
    unsafe { core::ptr::copy_nonoverlapping(new.as_ptr(), site as *mut u8, 7) };
    set(libc::PROT_READ | libc::PROT_EXEC)?;
    Ok(())
}

/// A jump to `target` within reach of `site`.
fn near(site: usize, target: usize) -> Result<usize, PatchError> {
    for k in 2..4000 {
        // Below and above in turn, up to about 1 GiB away.
        let (step, page) = ((k / 2) * (512 << 10), site & !0xffff);
        let hint = if k % 2 == 0 { page - step } else { page + step };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: NOREPLACE maps only free addresses.
        let Ok(at) = (unsafe { sys!(libc::SYS_mmap, hint, 4096, prot, flags, -1isize, 0) }) else { continue };
        let mut jump = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        jump[6..].copy_from_slice(&target.to_le_bytes());
        // SAFETY: a fresh page of ours, made executable afterwards.
        unsafe {
            core::ptr::copy_nonoverlapping(jump.as_ptr(), at as *mut u8, jump.len());
            sys!(libc::SYS_mprotect, at, 4096, libc::PROT_READ | libc::PROT_EXEC).map_err(PatchError::Memory)?;
        }
        return Ok(at);
    }
    Err(PatchError::Memory(libc::ENOMEM))
}
