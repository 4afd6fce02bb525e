//! Memory with a limit for a program's own data: what does not fit is kept compressed.
//!
//! ```no_run
//! use uzswap::{Options, Region};
//! let mut region = Region::new(512 << 20, &Options::new(256 << 20))?;
//! // SAFETY: nobody else uses the region, and no system call is given a pointer into it.
//! let bytes = unsafe { region.as_slice_mut() };
//! bytes[0] = 1;
//! # Ok::<(), uzswap::Error>(())
//! ```
//!
//! Read [`region`] first: it says in which few ways a region differs from ordinary memory.

#[doc(hidden)]
pub mod directory;
#[doc(hidden)]
pub mod group_file;
pub mod handover;
pub mod process;

pub use process::WriteWatch;
pub use uzswap_mm::pagemap;
pub use uzswap_pager::region::{self, Compaction, Compressor, Error, Options, Region, RegionWatch, Stats};
pub use uzswap_pager::shared::{self, SharedControl, SharedMapping, SharedOptions, SharedPin, SharedRegion};
