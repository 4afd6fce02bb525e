//! Wraps system calls that libc makes inside itself.
//!
//! malloc grows by calls that never pass the symbol table, and fork's child runs libc code before any handler could
//! run, so interposing symbols is not enough. Each function concerned makes its call with the seven bytes
//! `mov eax, NR; syscall`. They become `call thunk; nop`, and the thunk makes the call and tells the agent. Only that
//! exact pattern is patched; if it is missing, the caller is told. The thunks preserve every register that a system
//! call preserves. They leave `errno` to the libc that made the call: a process may have several (`others`).
//!
//! Some functions are interposed as well (`clone`, `syscall`, `prctl`, `mlockall`). A library opened with RTLD_DEEPBIND
//! calls libc's own, and so does all that another libc serves. These are patched where their code is known; where it is
//! not, only the interposed ones are followed.

use crate::symbols::Libc;
use crate::{near, sites};
use core::arch::global_asm;
use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
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
    // clone, which gives a child a stack of its own: it goes on where the call came from. (r9 is free there.)
    ".globl uz_thunk_new_stack", "uz_thunk_new_stack:",
    "mov r9, [rsp]",
    "test edi, {shares}", "jnz 2f",
    "UZ_SAVE", "mov rcx, r10", "call {before_clone}", "UZ_RESTORE",
    "mov eax, 56", "syscall",
    "test rax, rax", "jz 3f",
    "UZ_SAVE", "mov rdi, rax", "call {after_fork}", "UZ_RESTORE",
    "ret",
    "2:",
    "mov eax, 56", "syscall",
    "test rax, rax", "jz 3f",
    "ret",
    "3:",
    "jmp r9",
    // Calls that programs may also make by their number.
    ".globl uz_thunk_prctl", "uz_thunk_prctl:",
    "mov eax, 157", "jmp 2f",
    ".globl uz_thunk_mlockall", "uz_thunk_mlockall:",
    "mov eax, 151", "jmp 2f",
    // syscall: its last argument is on the stack. If it is for the kernel, a child may return on a stack of its own,
    // from here as it would from libc's function.
    ".globl uz_thunk_syscall", "uz_thunk_syscall:",
    "mov r9, [rsp + 16]",
    "2:",
    "UZ_SAVE", "lea rsp, [rsp - 48]",
    "mov [rsp], rdi", "mov [rsp + 8], rsi", "mov [rsp + 16], rdx",
    "mov [rsp + 24], r10", "mov [rsp + 32], r8", "mov [rsp + 40], r9",
    "mov rdi, rax", "mov rsi, rsp", "call {made}", "mov [rbp - 56], rax",
    "lea rsp, [rsp + 48]", "test edx, edx", "UZ_RESTORE",
    "jnz 2f",
    "syscall",
    "2:",
    "ret",
    // The loader's state changed. Its callers may know which registers its function used: none.
    ".globl uz_thunk_loader", "uz_thunk_loader:",
    "push rcx", "push r11",
    "UZ_SAVE", "call {loader_changed}", "UZ_RESTORE",
    "pop r11", "pop rcx",
    "ret",
    shares = const libc::CLONE_VM,
    before_clone = sym crate::rawfork::before_clone,
    made = sym crate::rawfork::made,
    loader_changed = sym crate::others::loader_changed,
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
    fn uz_thunk_new_stack();
    fn uz_thunk_syscall();
    fn uz_thunk_prctl();
    fn uz_thunk_mlockall();
    fn uz_thunk_loader();
}

/// Why libc could not be patched.
#[derive(Debug)]
pub enum PatchError {
    /// A function's code has no `mov eax, NR; syscall`.
    Pattern,
    /// No memory near libc, or its code cannot be made writable.
    Memory(#[allow(dead_code)] Errno),
}

/// How the call is found in a function's code.
#[derive(Clone, Copy)]
enum Find {
    /// By its number.
    Number(u32),
    /// As libc's `clone` makes it.
    NewStack,
    /// As libc's `syscall` makes it.
    AnyNumber,
}

/// A function of libc that is patched.
struct Function {
    name: &'static CStr,
    find: Find,
    thunk: unsafe extern "C" fn(),
}

/// How many of them, from the first on, must be patched.
#[derive(Clone, Copy)]
pub enum Needed {
    /// What cannot be interposed.
    InFirst = 6,
    /// Also what makes processes: nothing of another libc's is interposed.
    InOthers = 8,
}

/// All of them. If those at the end cannot be patched, programs start with the environment that they are given, and
/// what is interposed is followed only by that.
const FUNCTIONS: [Function; 11] = [
    Function { name: c"_Fork", find: Find::Number(56), thunk: uz_thunk_clone },
    Function { name: c"mmap64", find: Find::Number(9), thunk: uz_thunk_mmap },
    Function { name: c"brk", find: Find::Number(12), thunk: uz_thunk_brk },
    Function { name: c"munmap", find: Find::Number(11), thunk: uz_thunk_munmap },
    Function { name: c"mremap", find: Find::Number(25), thunk: uz_thunk_mremap },
    Function { name: c"madvise", find: Find::Number(28), thunk: uz_thunk_madvise },
    Function { name: c"clone", find: Find::NewStack, thunk: uz_thunk_new_stack },
    Function { name: c"syscall", find: Find::AnyNumber, thunk: uz_thunk_syscall },
    Function { name: c"execve", find: Find::Number(59), thunk: uz_thunk_execve },
    Function { name: c"prctl", find: Find::Number(157), thunk: uz_thunk_prctl },
    Function { name: c"mlockall", find: Find::Number(151), thunk: uz_thunk_mlockall },
];
/// The place of `clone` among them.
const CLONE: usize = 6;
/// The jump for the loader's function follows theirs.
const LOADER: usize = FUNCTIONS.len();
/// Bytes from one jump of a page to the next.
const JUMP: usize = 16;
/// Bytes of a function in which its call is looked for.
const LOOKED_AT: usize = 160;

/// The pages of jumps: another libc uses one within its reach.
static PAGES: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
/// Whether the `clone` of the libc that the agent calls is patched.
static CLONES: AtomicBool = AtomicBool::new(false);

/// A system call in libc's code, and the function whose thunk replaces it.
#[derive(Clone, Copy)]
struct Site {
    at: usize,
    function: usize,
}

/// Patches the libc that the agent calls. Every process pays for this when it starts, so all functions share a page of
/// jumps, and libc's code is made writable only once.
///
/// # Errors
/// [`PatchError`]; then nothing was changed.
///
/// # Safety
/// No other thread may run in libc meanwhile (a preload constructor).
pub unsafe fn install() -> Result<(), PatchError> {
    let libc = Libc::find().ok_or(PatchError::Pattern)?;
    // SAFETY: as the caller promises.
    let patched = unsafe { install_in(&libc, Needed::InFirst) }?;
    CLONES.store(patched[CLONE], Relaxed);
    Ok(())
}

/// Whether libc's `clone` is followed in its code, so that the interposed one need only call it.
pub fn follows_clone() -> bool {
    CLONES.load(Relaxed)
}

/// Patches a libc; returns which functions were. One that is patched already stays as it is.
///
/// # Errors
/// [`PatchError`]; then nothing was changed.
///
/// # Safety
/// No other thread may run in that libc, unless it is patched.
pub unsafe fn install_in(libc: &Libc, needed: Needed) -> Result<[bool; FUNCTIONS.len()], PatchError> {
    let mut patched = [false; FUNCTIONS.len()];
    if is_patched(libc) {
        return Ok(patched);
    }
    let mut sites = [Site { at: 0, function: 0 }; FUNCTIONS.len()];
    let mut n = 0;
    for (i, function) in FUNCTIONS.iter().enumerate() {
        match call_in(libc, function) {
            Some(at) => {
                sites[n] = Site { at, function: i };
                n += 1;
                patched[i] = true;
            }
            None if i < needed as usize => return Err(PatchError::Pattern),
            None => {}
        }
    }
    // SAFETY: no other thread runs in libc, as the caller promises; each site is such a call, and the thunks preserve
    // what a system call preserves.
    unsafe { redirect(&sites[..n]) }?;
    Ok(patched)
}

/// A function's code, as far as it is looked at.
fn code(at: usize) -> &'static [u8] {
    // SAFETY: libc's text extends further than this behind each of its functions, and stays while it is looked at.
    unsafe { core::slice::from_raw_parts(at as *const u8, LOOKED_AT) }
}

/// Where a function of `libc` makes its call.
fn call_in(libc: &Libc, function: &Function) -> Option<usize> {
    let at = libc.symbol(function.name);
    let code = code((at != 0).then_some(at)?);
    let found = match function.find {
        Find::Number(nr) => sites::call(code, nr),
        Find::NewStack => sites::new_stack(code),
        Find::AnyNumber => sites::by_number(code),
    };
    found.map(|n| at + n)
}

/// Whether a libc has been patched: its first function calls a jump of ours.
fn is_patched(libc: &Libc) -> bool {
    let at = libc.symbol(FUNCTIONS[0].name);
    if at == 0 {
        return false;
    }
    let is_ours = |jump: usize| PAGES.iter().any(|page| page.load(Relaxed) == jump);
    code(at).windows(sites::BYTES).enumerate().any(|(i, bytes)| match bytes {
        [0xe8, a, b, c, d, 0x66, 0x90] => {
            let distance = i32::from_le_bytes([*a, *b, *c, *d]);
            is_ours((at + i + 5).wrapping_add_signed(distance as isize))
        }
        _ => false,
    })
}

/// Redirects the calls at `sites` to their thunks.
///
/// # Safety
/// No other thread may run there. At each site there must be such a call, all in one mapping, and each thunk must
/// preserve every register that a system call preserves.
unsafe fn redirect(sites: &[Site]) -> Result<(), PatchError> {
    let first = sites.iter().map(|site| site.at).min().unwrap_or(0);
    let end = sites.iter().map(|site| site.at + sites::BYTES).max().unwrap_or(0);
    // SAFETY: as the caller promises; what is written is the call and two bytes without effect.
    unsafe {
        rewrite(first, end, |jumps| {
            for site in sites {
                let mut new = [0xe8, 0, 0, 0, 0, 0x66, 0x90];
                let jump = jumps + site.function * JUMP;
                new[1..5].copy_from_slice(&(jump.wrapping_sub(site.at + 5) as u32).to_le_bytes());
                core::ptr::copy_nonoverlapping(new.as_ptr(), site.at as *mut u8, new.len());
            }
        })
    }
}

/// Has the loader's function at `f`, which only returns, tell of each change of its state.
///
/// # Errors
/// [`PatchError`]; then nothing was changed.
///
/// # Safety
/// No other thread may run in the loader. `f` must be that function.
pub unsafe fn follow_loader(f: usize) -> Result<(), PatchError> {
    if f == 0 {
        return Err(PatchError::Pattern);
    }
    // SAFETY: the loader's text extends further than this behind the function, which is not its last.
    let code = unsafe { core::slice::from_raw_parts(f as *const u8, 32) };
    let at = f + sites::last(code).ok_or(PatchError::Pattern)?;
    // SAFETY: as the caller promises; what is written is a jump, where there was a return and padding.
    unsafe {
        rewrite(at, at + 5, |jumps| {
            let mut new = [0xe9, 0, 0, 0, 0];
            new[1..].copy_from_slice(&((jumps + LOADER * JUMP).wrapping_sub(at + 5) as u32).to_le_bytes());
            core::ptr::copy_nonoverlapping(new.as_ptr(), at as *mut u8, new.len());
        })
    }
}

/// Has `write` change the code from `first` to `end`, given a page of jumps within its reach.
///
/// # Safety
/// No other thread may run there, all of it must be in one mapping of code, and `write` must leave code there that does
/// what it should.
unsafe fn rewrite(first: usize, end: usize, write: impl FnOnce(usize)) -> Result<(), PatchError> {
    let (first, end) = (first & !(PAGE - 1), end.next_multiple_of(PAGE));
    let jumps = jumps(first, end)?;
    let set = |prot: i32| {
        // SAFETY: the pages are code, which stays executable throughout.
        unsafe { sys!(libc::SYS_mprotect, first, end - first, prot) }.map_err(PatchError::Memory)
    };
    set(libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC)?;
    write(jumps);
    set(libc::PROT_READ | libc::PROT_EXEC)?;
    Ok(())
}

/// A page of jumps to the thunks, those of [`FUNCTIONS`] and the loader's, within reach of everything from `first` to
/// `end`. One that serves is used again: a program may load and unload libraries any number of times.
fn jumps(first: usize, end: usize) -> Result<usize, PatchError> {
    let pages = || PAGES.iter().map(|page| page.load(Relaxed)).take_while(|page| *page != 0);
    if let Some(page) = pages().find(|page| near::is_within_reach(*page, first, end)) {
        return Ok(page);
    }
    let unused = PAGES.get(pages().count()).ok_or(PatchError::Memory(libc::ENOMEM))?;
    let at = near::page(first, end).map_err(PatchError::Memory)?;
    let thunks = FUNCTIONS.iter().map(|function| function.thunk).chain([uz_thunk_loader as unsafe extern "C" fn()]);
    for (thunk, jump) in thunks.zip((at..).step_by(JUMP)) {
        let mut code = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        code[6..].copy_from_slice(&(thunk as usize).to_le_bytes());
        // SAFETY: a fresh page of ours, in which there is room for all of them.
        unsafe { core::ptr::copy_nonoverlapping(code.as_ptr(), jump as *mut u8, code.len()) };
    }
    // SAFETY: a page of ours.
    unsafe { sys!(libc::SYS_mprotect, at, PAGE, libc::PROT_READ | libc::PROT_EXEC) }.map_err(PatchError::Memory)?;
    unused.store(at, Relaxed);
    Ok(at)
}
