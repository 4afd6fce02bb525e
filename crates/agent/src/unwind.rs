//! The unwinder's functions, which nobody calls: so that no process has to load it.
//!
//! The standard library is compiled to unwind when it panics, and names the functions of libgcc for it. The agent is compiled to
//! abort, so they are never called; but the library that has them was loaded into every process: four mappings, and a constructor that
//! asks the processor what it can do, by an instruction that virtual machines trap. That was a sixth of what a process costs.
//!
//! So the names are defined here, hidden (the program does not see them): each ends the process. Exceptions of the program's, and
//! threads that it cancels, pass through the agent's functions as ever, which say how (`.eh_frame`), and have nothing to be asked.

use core::arch::global_asm;

global_asm!(
    ".macro UZ_NO_UNWIND name",
    ".hidden \\name",
    ".globl \\name",
    ".type \\name, @function",
    "\\name:",
    "ud2",
    ".size \\name, . - \\name",
    ".endm",
    "UZ_NO_UNWIND _Unwind_Resume",
    "UZ_NO_UNWIND _Unwind_GetIP",
    "UZ_NO_UNWIND _Unwind_GetIPInfo",
    "UZ_NO_UNWIND _Unwind_GetLanguageSpecificData",
    "UZ_NO_UNWIND _Unwind_GetRegionStart",
    "UZ_NO_UNWIND _Unwind_GetTextRelBase",
    "UZ_NO_UNWIND _Unwind_GetDataRelBase",
    "UZ_NO_UNWIND _Unwind_SetGR",
    "UZ_NO_UNWIND _Unwind_SetIP",
    ".purgem UZ_NO_UNWIND",
    // What a panic says where it came from asks for the frames of: there are none.
    ".hidden _Unwind_Backtrace",
    ".globl _Unwind_Backtrace",
    ".type _Unwind_Backtrace, @function",
    "_Unwind_Backtrace:",
    "mov eax, 5",
    "ret",
    ".size _Unwind_Backtrace, . - _Unwind_Backtrace",
);
