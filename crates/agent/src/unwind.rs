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
    ".macro UZ_UNWIND name",
    ".hidden \\name",
    ".globl \\name",
    ".type \\name, @function",
    "\\name:",
    ".endm",
    "UZ_UNWIND _Unwind_Resume",
    "UZ_UNWIND _Unwind_GetIP",
    "UZ_UNWIND _Unwind_GetIPInfo",
    "UZ_UNWIND _Unwind_GetLanguageSpecificData",
    "UZ_UNWIND _Unwind_GetRegionStart",
    "UZ_UNWIND _Unwind_GetTextRelBase",
    "UZ_UNWIND _Unwind_GetDataRelBase",
    "UZ_UNWIND _Unwind_SetGR",
    "UZ_UNWIND _Unwind_SetIP",
    "ud2",
    // What a panic says where it came from asks for the frames of: there are none (_URC_END_OF_STACK).
    "UZ_UNWIND _Unwind_Backtrace",
    "mov eax, 5",
    "ret",
    ".purgem UZ_UNWIND",
);
