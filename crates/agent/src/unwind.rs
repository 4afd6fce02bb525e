//! Stubs of the unwinder's functions, so that no process has to load the unwinder.
//!
//! The standard library is compiled to unwind when it panics, and refers to functions of libgcc for it. The agent is
//! compiled to abort, so they are never called. But the library that has them was loaded into every process: four
//! mappings, and a constructor that queries the processor's features by an instruction that virtual machines trap. That
//! was a sixth of what a process costs.
//! So their names are defined here, hidden, so that the program does not see them; each ends the process. The program's
//! exceptions, and the unwinding of cancelled threads, pass through the agent's functions as through any others: these
//! describe their frames (`.eh_frame`), and have no handlers to call.
//! their frames (`.eh_frame`), and have no handlers to call.

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
    // A panic's message asks for the frames it came from: there are none (_URC_END_OF_STACK).
    "UZ_UNWIND _Unwind_Backtrace",
    "mov eax, 5",
    "ret",
    ".purgem UZ_UNWIND",
);
