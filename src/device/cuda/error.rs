//! What keeps a GPU from being used, and calls of its driver that failed.

use std::fmt;

use crate::device::DeviceError;

/// A GPU can't be used. There is no engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No CUDA driver is installed, or the loader doesn't find it.
    #[error("no CUDA driver: {} found in the loader's search path", none_of(looked_for))]
    NoDriver {
        /// Names that the loader was asked for.
        looked_for: Vec<String>,
    },
    /// The library that the loader finds is a toolkit's stand-in for linking, not a driver.
    #[error("libcuda.so is the CUDA toolkit's stub: take its `stubs` folder out of the loader's search path")]
    Stub,
    /// The driver lacks a function that this crate calls.
    #[error("the CUDA driver has no `{function}`: CUDA {needed} is needed")]
    MissingFunction {
        /// The function.
        function: &'static str,
        /// The version of CUDA that has it.
        needed: CudaVersion,
    },
    /// The driver is too old for the kernels of this crate.
    #[error("the driver supports CUDA {found}, {needed} is needed")]
    DriverTooOld {
        /// What the driver supports.
        found: CudaVersion,
        /// What the kernels were built with.
        needed: CudaVersion,
    },
    /// The driver sees no GPU of this number.
    #[error("there is no GPU {ordinal}: the driver sees {devices}")]
    NoDevice {
        /// The number asked for.
        ordinal: u32,
        /// GPUs that the driver sees.
        devices: u32,
    },
    /// The GPU can't do what the engine needs.
    #[error("GPU {ordinal} ({name}) {lacks}")]
    Unsupported {
        /// Its number.
        ordinal: u32,
        /// Its name.
        name: String,
        /// What is missing, as a sentence goes on.
        lacks: String,
    },
    /// A call of the driver failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The GPU has no memory for what every engine needs.
    #[error(transparent)]
    Memory(#[from] DeviceError),
}

fn none_of(names: &[String]) -> String {
    match names {
        [first, .., last] => format!("none of {first} to {last} ({} names) was", names.len()),
        _ => format!("{names:?} was not"),
    }
}

/// A version of CUDA, as `13.0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
}

impl CudaVersion {
    /// From the driver's form, 1000 times major and 10 times minor.
    pub(super) fn from_driver(version: i32) -> Self {
        let version = version.max(0).cast_unsigned();
        Self { major: version / 1000, minor: version % 1000 / 10 }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: i32 = 2;

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct CallError {
    /// The driver's function.
    pub call: &'static str,
    /// Its `CUresult`.
    pub code: i32,
    /// The name of the code, as `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub name: String,
}

impl CallError {
    /// As an error of memory that `label` names.
    pub(super) fn for_memory(self, label: &'static str, needed: usize, available: u64) -> DeviceError {
        match self.code {
            OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { label, needed_bytes: needed as u64, available_bytes: available }
            }
            _ => DeviceError::Operation { operation: label, detail: self.to_string() },
        }
    }

    /// As an error of an operation.
    pub(super) fn during(self, operation: &'static str) -> DeviceError {
        DeviceError::Operation { operation, detail: self.to_string() }
    }
}
