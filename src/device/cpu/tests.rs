//! Tests of the CPU device, through the [`Device`](crate::device::Device) trait where they can be.

pub(in crate::device) mod attention;
mod math;
mod matmul;
mod memory;
pub(in crate::device) mod packed;
mod pool;
pub(in crate::device) mod rig;
mod rows;
mod throughput;
