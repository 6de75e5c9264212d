//! The engine on an emulated GPU: the CUDA backend as it is, its driver and its kernels on the CPU.

mod conformance;
mod faults;
mod graphs;
mod lost;
mod parity;
mod random;
mod unmapped;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use super::{Bits, Seeded, awake_on, bits, build_on, cpu, loaded_on, requests};
use crate::device::cuda::emulated::{Emulated, EmulatedDevice};
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::engine::{Awake, Engine, MemoryReport};
use crate::request::Request;

const PAGE: u64 = 4096;

/// An emulated GPU of the test's own, with small pages, memory full of NaNs and a mix of orders in which work runs.
struct Gpu {
    emulated: EmulatedDevice,
    device: Arc<CudaDevice>,
}

impl Gpu {
    fn new() -> Self {
        Self::with(None, true)
    }

    fn with(memory_limit_bytes: Option<u64>, keep_parking_memory: bool) -> Self {
        let emulated = emulated();
        Self { device: device(emulated, memory_limit_bytes, keep_parking_memory), emulated }
    }

    fn device(&self) -> Arc<CudaDevice> {
        Arc::clone(&self.device)
    }

    /// Ends it: nothing may be left, and nothing undefined was done.
    #[track_caller]
    fn assert_clean(self) {
        drop(self.device);
        self.emulated.assert_clean();
    }
}

fn emulated() -> EmulatedDevice {
    Emulated::load().adverse_device()
}

fn device(emulated: EmulatedDevice, memory_limit_bytes: Option<u64>, keep: bool) -> Arc<CudaDevice> {
    let ordinal = emulated.ordinal.unsigned_abs();
    let options = CudaOptions { ordinal, memory_limit_bytes, keep_parking_memory: keep };
    Arc::new(CudaDevice::open(options, cpu()).unwrap())
}

/// Device memory that the parts of a report take, in whole pages.
fn device_bytes(memory: &MemoryReport) -> u64 {
    let parts = [memory.weights_bytes, memory.kv_cache_bytes, memory.workspace_bytes];
    parts.iter().map(|bytes| bytes.next_multiple_of(PAGE)).sum()
}

/// A prefill and two decodes.
fn probe() -> Vec<Request> {
    vec![Request::new(vec![5, 9, 17, 33, 2, 8]).max_new_tokens(3).ignore_eos(true).seed(3).logprobs(true)]
}

/// What a fresh engine on a GPU of its own, with these weights, says to some requests.
fn on_fresh_gpu(seed: u64, what: fn() -> Vec<Request>) -> Bits {
    static KNOWN: LazyLock<Mutex<HashMap<(u64, String), Bits>>> = LazyLock::new(Mutex::default);
    let key = (seed, format!("{:?}", what()));
    if let Some(known) = KNOWN.lock().unwrap().get(&key) {
        return known.clone();
    }
    let gpu = Gpu::new();
    let said = bits(&awake_on(gpu.device(), seed).generate(&what()).unwrap());
    gpu.assert_clean();
    KNOWN.lock().unwrap().insert(key, said.clone());
    said
}

/// It says what a fresh engine says, to the probe.
#[track_caller]
fn assert_serves(engine: &Engine<Awake>, seed: u64) {
    engine.clear_prefix_cache();
    assert_eq!(bits(&engine.generate(&probe()).expect("no fault is left")), on_fresh_gpu(seed, probe));
}

/// As [`assert_serves`], with groups, chunks of prefill, copies of blocks, hits.
#[track_caller]
fn assert_serves_all(engine: &Engine<Awake>, seed: u64) {
    assert_eq!(bits(&engine.generate(&requests()).expect("no fault is left")), on_fresh_gpu(seed, requests));
}
