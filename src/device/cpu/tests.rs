//! Tests of the CPU device, through the [`Device`](crate::device::Device) trait where they can be.

mod attention;
mod math;
mod matmul;
mod memory;
mod packed;
mod pool;
mod rig;
mod rows;
mod throughput;
