//! Recognises the code that is patched (`patch`, `others`), byte by byte: what is not known exactly is left alone.

/// `endbr64`, with which functions begin in libraries built for control-flow enforcement.
const LANDING: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
/// Bytes of each site that is redirected, except [`last`]'s.
pub const BYTES: usize = 7;
/// Any byte: where a jump goes to.
const ANY: u16 = 0x100;

/// libc's `clone`. The call and what follows it is the same in all versions from 2.34 to 2.43: the stack of the child
/// holds its function and that one's argument, and register r9 is free.
const CLONE: [u16; 67] = [
    0x48, 0xc7, 0xc0, 0xea, 0xff, 0xff, 0xff, // mov rax, -EINVAL
    0x48, 0x85, 0xff, 0x74, ANY, // test rdi, rdi; jz
    0x48, 0x83, 0xe6, 0xf0, 0x74, ANY, // and rsi, -16; jz
    0x48, 0x89, 0x4e, 0xf8, // mov [rsi - 8], rcx
    0x48, 0x83, 0xee, 0x10, // sub rsi, 16
    0x48, 0x89, 0x3e, // mov [rsi], rdi
    0x48, 0x89, 0xd7, 0x4c, 0x89, 0xc2, 0x4d, 0x89, 0xc8, // mov rdi, rdx; mov rdx, r8; mov r8, r9
    0x4c, 0x8b, 0x54, 0x24, 0x08, // mov r10, [rsp + 8]
    0xb8, 0x38, 0x00, 0x00, 0x00, 0x0f, 0x05, // mov eax, 56; syscall
    0x48, 0x85, 0xc0, 0x7c, ANY, 0x74, 0x01, 0xc3, // test rax, rax; jl; jz to behind the ret; ret
    0x31, 0xed, 0x58, 0x5f, 0xff, 0xd0, // xor ebp, ebp; pop rax; pop rdi; call rax
    0x48, 0x89, 0xc7, // mov rdi, rax
];
/// Where in [`CLONE`] the call is.
const CLONE_CALL: usize = 43;

/// libc's `syscall`.
const SYSCALL: [u16; 34] = [
    0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, // mov rax, rdi; mov rdi, rsi; mov rsi, rdx
    0x48, 0x89, 0xca, 0x4d, 0x89, 0xc2, 0x4d, 0x89, 0xc8, // mov rdx, rcx; mov r10, r8; mov r8, r9
    0x4c, 0x8b, 0x4c, 0x24, 0x08, 0x0f, 0x05, // mov r9, [rsp + 8]; syscall
    0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff, 0x73, 0x01, 0xc3, // cmp rax, -4095; jae to behind the ret; ret
];
/// Where in [`SYSCALL`] the last argument is read, and the call made.
const SYSCALL_CALL: usize = 18;

/// Where a function makes system call `nr`: `mov eax, NR; syscall`.
pub fn call(code: &[u8], nr: u32) -> Option<usize> {
    let mut pattern = [0xb8, 0, 0, 0, 0, 0x0f, 0x05];
    pattern[1..5].copy_from_slice(&nr.to_le_bytes());
    code.windows(BYTES).position(|w| w == pattern)
}

/// Where libc's `clone` makes its call.
pub fn new_stack(code: &[u8]) -> Option<usize> {
    whole(code, &CLONE).map(|start| start + CLONE_CALL)
}

/// Where libc's `syscall` reads its last argument and makes the call.
pub fn by_number(code: &[u8]) -> Option<usize> {
    whole(code, &SYSCALL).map(|start| start + SYSCALL_CALL)
}

/// Where a function that begins so begins, behind its landing.
fn whole(code: &[u8], pattern: &[u16]) -> Option<usize> {
    let start = if code.starts_with(&LANDING) { LANDING.len() } else { 0 };
    let code = code.get(start..start + pattern.len())?;
    code.iter().zip(pattern).all(|(byte, known)| *known == ANY || u16::from(*byte) == *known).then_some(start)
}

/// Where a function that only returns does so, if enough padding follows that a jump of five bytes fits there.
pub fn last(code: &[u8]) -> Option<usize> {
    let start = if code.starts_with(&LANDING) { LANDING.len() } else { 0 };
    let (mut n, code) = (1, code.get(start..)?);
    if code.first() != Some(&0xc3) {
        return None;
    }
    while n < 5 {
        n += padding(code.get(n..)?)?;
    }
    Some(start)
}

/// The length of the instruction without effect that begins here, as compilers fill gaps with.
fn padding(code: &[u8]) -> Option<usize> {
    let prefixes = code.iter().take_while(|byte| [0x66, 0x2e].contains(*byte)).count();
    let tail = match code.get(prefixes..)? {
        [0x90, ..] => 1,
        [0x0f, 0x1f, 0x00, ..] => 3,
        [0x0f, 0x1f, 0x40, 0, ..] => 4,
        [0x0f, 0x1f, 0x44, 0, 0, ..] => 5,
        [0x0f, 0x1f, 0x80, 0, 0, 0, 0, ..] => 7,
        [0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, ..] => 8,
        _ => return None,
    };
    Some(prefixes + tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(pattern: &[u16]) -> Vec<u8> {
        pattern.iter().map(|byte| if *byte == ANY { 0x3c } else { *byte as u8 }).collect()
    }

    fn with_landing(code: &[u8]) -> Vec<u8> {
        [&LANDING, code].concat()
    }

    /// A function is known from its first byte to behind the call, wherever it jumps to on failure; if any byte differs,
    /// or is missing, it is not.
    #[test]
    fn only_code_that_is_known_whole_is_recognised() {
        for (pattern, at, find) in
            [(&CLONE[..], CLONE_CALL, new_stack as fn(&[u8]) -> Option<usize>), (&SYSCALL[..], SYSCALL_CALL, by_number)]
        {
            let code = bytes(pattern);
            assert_eq!((find(&code), find(&with_landing(&code))), (Some(at), Some(at + 4)));
            assert_eq!(code[at + BYTES - 2..at + BYTES], [0x0f, 0x05], "a system call");
            for (i, known) in pattern.iter().enumerate() {
                let mut other = code.clone();
                other[i] ^= 1;
                let expected = (*known == ANY).then_some(at);
                assert_eq!((find(&other), find(&code[..i])), (expected, None), "{i}");
            }
        }
    }

    /// Those of the libc at hand, from 2.34 to 2.43: fails where a version begins to differ.
    #[test]
    fn the_functions_of_this_libc_are_known() {
        unsafe extern "C" {
            fn clone();
            fn syscall();
        }
        // SAFETY: text of libc's, which extends further than this behind each function.
        let code = |f: unsafe extern "C" fn()| unsafe { core::slice::from_raw_parts(f as *const u8, 160) };
        assert!(new_stack(code(clone)).is_some(), "{:x?}", code(clone));
        assert!(by_number(code(syscall)).is_some(), "{:x?}", code(syscall));
    }

    #[test]
    fn calls_are_found_by_their_number() {
        let code = [0x31, 0xd2, 0xb8, 9, 0, 0, 0, 0x0f, 0x05, 0xb8, 11, 0, 0, 0, 0x0f, 0x05];
        assert_eq!([9, 11, 12].map(|nr| call(&code, nr)), [Some(2), Some(9), None]);
    }

    /// Its padding is that of several glibcs; a debugger's breakpoint is none.
    #[test]
    fn a_function_that_only_returns() {
        let long = [0xc3, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x0f, 0x1f, 0x40, 0];
        let short = [0xc3, 0x90, 0x66, 0x90, 0x0f, 0x1f, 0];
        assert_eq!((last(&long), last(&with_landing(&long))), (Some(0), Some(4)));
        assert_eq!((last(&short), last(&short[..4]), last(&short[..1])), (Some(0), None, None));
        // Another function right behind it, a breakpoint in front, and one behind.
        for (i, byte) in [(1, 0x48), (0, 0xcc), (1, 0xcc), (4, 0xcc)] {
            let mut other = long;
            other[i] = byte;
            assert_eq!(last(&other), None, "{i}");
        }
    }
}
