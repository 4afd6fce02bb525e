//! Copies, clears and compares bytes, in functions of uzswap's own.
//!
//! The compiler emits calls of `memcpy` and its kin, also in uzswap's threads and while the pager's lock is held. Two
//! stories:
//!
//! - Sanitizers put their own before libc's. These look at shadow memory of the program's, in which pages may be out:
//!   when a program built with AddressSanitizer engaged, its ticker waited for itself, and the program forever.
//! - A debugger that must stop at `memmove` writes its breakpoint into all functions of that name, libc's included. It
//!   does not trace uzswap's threads: one that met the breakpoint there ended the program (SIGTRAP).
//!
//! So nothing here leads to libc's functions, and the names differ: the linker takes `__wrap_memcpy` for `memcpy`
//! (`--wrap`, in the build script). They are hidden, so the program does not see them. Most copies are pages, or a few
//! bytes. At sixteen bytes a time, as every processor can do, that takes next to nothing of a fault.

use core::arch::global_asm;

global_asm!(
    ".macro UZ_BYTES name",
    ".hidden \\name",
    ".globl \\name",
    ".type \\name, @function",
    "\\name:",
    ".endm",
    ".text",
    ".balign 64",
    // The ranges may overlap, so the end of a piece is read before any of it is written.
    "UZ_BYTES __wrap_memcpy",
    "UZ_BYTES __wrap_memmove",
    "mov rax, rdi",
    "cmp rdx, 16",
    "jb 4f",
    "cmp rdx, 32",
    "ja 2f",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "ret",
    "2:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + rdx - 32]",
    "movups xmm3, [rsi + rdx - 16]",
    "cmp rdx, 64",
    "ja 3f",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + rdx - 32], xmm2",
    "movups [rdi + rdx - 16], xmm3",
    "ret",
    // More than 64: upwards, unless the destination begins within the source.
    "3:",
    "mov rcx, rdi",
    "sub rcx, rsi",
    "cmp rcx, rdx",
    "jb 8f",
    "movups xmm0, [rsi + rdx - 64]",
    "movups xmm1, [rsi + rdx - 48]",
    "lea r8, [rdi + rdx - 64]",
    "7:",
    "movups xmm4, [rsi]",
    "movups xmm5, [rsi + 16]",
    "movups xmm6, [rsi + 32]",
    "movups xmm7, [rsi + 48]",
    "movups [rdi], xmm4",
    "movups [rdi + 16], xmm5",
    "movups [rdi + 32], xmm6",
    "movups [rdi + 48], xmm7",
    "add rsi, 64",
    "add rdi, 64",
    "cmp rdi, r8",
    "jb 7b",
    "movups [r8], xmm0",
    "movups [r8 + 16], xmm1",
    "movups [r8 + 32], xmm2",
    "movups [r8 + 48], xmm3",
    "ret",
    // Downwards, to the first 64, which are written last.
    "8:",
    "movups xmm2, [rsi + 32]",
    "movups xmm3, [rsi + 48]",
    "7:",
    "movups xmm4, [rsi + rdx - 64]",
    "movups xmm5, [rsi + rdx - 48]",
    "movups xmm6, [rsi + rdx - 32]",
    "movups xmm7, [rsi + rdx - 16]",
    "movups [rdi + rdx - 64], xmm4",
    "movups [rdi + rdx - 48], xmm5",
    "movups [rdi + rdx - 32], xmm6",
    "movups [rdi + rdx - 16], xmm7",
    "sub rdx, 64",
    "cmp rdx, 64",
    "ja 7b",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + 32], xmm2",
    "movups [rdi + 48], xmm3",
    "ret",
    // Less than 16.
    "4:",
    "cmp edx, 8",
    "jb 5f",
    "mov rcx, [rsi]",
    "mov r8, [rsi + rdx - 8]",
    "mov [rdi], rcx",
    "mov [rdi + rdx - 8], r8",
    "ret",
    "5:",
    "cmp edx, 4",
    "jb 6f",
    "mov ecx, [rsi]",
    "mov r8d, [rsi + rdx - 4]",
    "mov [rdi], ecx",
    "mov [rdi + rdx - 4], r8d",
    "ret",
    // Up to three: the first, the last, and the one in the middle.
    "6:",
    "test edx, edx",
    "jz 2f",
    "mov ecx, edx",
    "shr ecx, 1",
    "movzx r8d, byte ptr [rsi]",
    "movzx r9d, byte ptr [rsi + rcx]",
    "movzx r10d, byte ptr [rsi + rdx - 1]",
    "mov [rdi], r8b",
    "mov [rdi + rcx], r9b",
    "mov [rdi + rdx - 1], r10b",
    "2:",
    "ret",
    ".balign 64",
    "UZ_BYTES __wrap_memset",
    "mov rax, rdi",
    "movzx ecx, sil",
    "mov rsi, 0x0101010101010101",
    "imul rsi, rcx",
    "cmp rdx, 16",
    "jb 4f",
    "movq xmm0, rsi",
    "punpcklqdq xmm0, xmm0",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm0",
    "cmp rdx, 32",
    "jbe 3f",
    "movups [rdi + 16], xmm0",
    "movups [rdi + rdx - 32], xmm0",
    "cmp rdx, 64",
    "jbe 3f",
    "lea rcx, [rdi + rdx - 64]",
    "2:",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm0",
    "movups [rdi + 32], xmm0",
    "movups [rdi + 48], xmm0",
    "add rdi, 64",
    "cmp rdi, rcx",
    "jb 2b",
    "movups [rcx], xmm0",
    "movups [rcx + 16], xmm0",
    "3:",
    "ret",
    "4:",
    "cmp edx, 8",
    "jb 5f",
    "mov [rdi], rsi",
    "mov [rdi + rdx - 8], rsi",
    "ret",
    "5:",
    "cmp edx, 4",
    "jb 6f",
    "mov [rdi], esi",
    "mov [rdi + rdx - 4], esi",
    "ret",
    "6:",
    "test edx, edx",
    "jz 3b",
    "mov ecx, edx",
    "shr ecx, 1",
    "mov [rdi], sil",
    "mov [rdi + rcx], sil",
    "mov [rdi + rdx - 1], sil",
    "ret",
    ".balign 64",
    "UZ_BYTES __wrap_memcmp",
    "UZ_BYTES __wrap_bcmp",
    "cmp rdx, 16",
    "jb 5f",
    "2:",
    "movups xmm0, [rdi]",
    "movups xmm1, [rsi]",
    "pcmpeqb xmm0, xmm1",
    "pmovmskb eax, xmm0",
    "xor eax, 0xffff",
    "jnz 4f",
    "add rdi, 16",
    "add rsi, 16",
    "sub rdx, 16",
    "cmp rdx, 16",
    "jae 2b",
    "test rdx, rdx",
    "jz 3f",
    // The last sixteen, some of which are known to be equal.
    "lea rdi, [rdi + rdx - 16]",
    "lea rsi, [rsi + rdx - 16]",
    "mov edx, 16",
    "jmp 2b",
    "3:",
    "xor eax, eax",
    "ret",
    "4:",
    "bsf ecx, eax",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx ecx, byte ptr [rsi + rcx]",
    "sub eax, ecx",
    "ret",
    "5:",
    "xor ecx, ecx",
    "6:",
    "cmp rcx, rdx",
    "je 3b",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "jz 6b",
    "ret",
    "UZ_BYTES __wrap_strlen",
    // An aligned read stays within one page.
    "mov rax, rdi",
    "and rax, -16",
    "mov ecx, edi",
    "and ecx, 15",
    "pxor xmm0, xmm0",
    "movaps xmm1, [rax]",
    "pcmpeqb xmm1, xmm0",
    "pmovmskb edx, xmm1",
    "shr edx, cl",
    "test edx, edx",
    "jnz 3f",
    "2:",
    "add rax, 16",
    "movaps xmm1, [rax]",
    "pcmpeqb xmm1, xmm0",
    "pmovmskb edx, xmm1",
    "test edx, edx",
    "jz 2b",
    "bsf edx, edx",
    "add rax, rdx",
    "sub rax, rdi",
    "ret",
    "3:",
    "bsf eax, edx",
    "ret",
    ".purgem UZ_BYTES",
);

#[cfg(test)]
mod tests {
    use core::cmp::Ordering;

    unsafe extern "C" {
        fn __wrap_memcpy(to: *mut u8, from: *const u8, n: usize) -> *mut u8;
        fn __wrap_memmove(to: *mut u8, from: *const u8, n: usize) -> *mut u8;
        fn __wrap_memset(to: *mut u8, byte: i32, n: usize) -> *mut u8;
        fn __wrap_memcmp(a: *const u8, b: *const u8, n: usize) -> i32;
        fn __wrap_bcmp(a: *const u8, b: *const u8, n: usize) -> i32;
        fn __wrap_strlen(text: *const u8) -> usize;
    }

    /// Lengths at which the code changes its way, around the multiples of its step, and a page.
    fn lengths() -> impl Iterator<Item = usize> {
        (0..=200).chain([255, 256, 257, 1000, 4095, 4096, 4097])
    }

    /// Bytes of which no two at a distance of up to 250 are equal.
    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn what_is_copied_is_what_was_there() {
        for n in lengths() {
            for (to, from) in (0..70).flat_map(|d| [(70 + d, 70), (70, 70 + d), (3 + d, 5000), (70 - d, 70)]) {
                let (before, mut now) = (bytes(10_000), bytes(10_000));
                let mut expected = before.clone();
                expected.copy_within(from..from + n, to);
                let apart = to + n <= from || from + n <= to;
                for copy in [__wrap_memmove, __wrap_memcpy].into_iter().take(1 + usize::from(apart)) {
                    now.copy_from_slice(&before);
                    let at = now.as_mut_ptr();
                    // SAFETY: both ranges are in the buffer.
                    let given = unsafe { copy(at.add(to), at.add(from), n) };
                    assert!(given as usize - at as usize == to && now == expected, "{n} from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn what_is_set_is_that_and_no_more() {
        for n in lengths() {
            for at in 0..33 {
                let mut now = bytes(5000);
                let mut expected = now.clone();
                expected[100 + at..100 + at + n.min(4800)].fill(0xc5);
                let to = now[100 + at..].as_mut_ptr();
                // SAFETY: a range of the buffer.
                let given = unsafe { __wrap_memset(to, 0x7c5, n.min(4800)) };
                assert!(given == to && now == expected, "{n} at {at}");
            }
        }
    }

    #[test]
    fn what_differs_first_counts() {
        for n in lengths() {
            for (one, two) in [(0, 0), (1, 6), (15, 3)] {
                let (mut a, b) = (bytes(5000), bytes(5000));
                a.copy_within(two..two + n, one);
                let all = (a[one..one + n].to_vec(), b[two..two + n].to_vec());
                for differs in (0..n).chain([usize::MAX]) {
                    let (mut a, b) = all.clone();
                    if differs < n {
                        a[differs] ^= 0x80;
                        // The bytes behind say the opposite.
                        a[differs + 1..].iter_mut().for_each(|byte| *byte = byte.wrapping_sub(100));
                    }
                    // SAFETY: both are that long.
                    let (told, same) = unsafe {
                        let (a, b) = (a.as_ptr(), b.as_ptr());
                        (__wrap_memcmp(a, b, n), __wrap_bcmp(a, b, n))
                    };
                    let expected =
                        a.iter().zip(&b).map(|(a, b)| a.cmp(b)).find(|o| o.is_ne()).unwrap_or(Ordering::Equal);
                    assert!(told.cmp(&0) == expected && (same == 0) == expected.is_eq(), "{n}, differs at {differs}");
                }
            }
        }
    }

    #[test]
    fn a_string_ends_at_its_first_zero() {
        let mut text = vec![b'x'; 500];
        for (at, n) in (0..40).flat_map(|at| (0..100).map(move |n| (at, n))) {
            text.fill(b'x');
            text[..at].fill(0);
            text[at + n] = 0;
            // SAFETY: the text has a terminating zero.
            assert_eq!(unsafe { __wrap_strlen(text[at..].as_ptr()) }, n, "at {at}");
        }
    }
}
