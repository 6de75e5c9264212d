//! The emulated GPU that the engines of a test run on.

use std::cell::Cell;
use std::process::exit;

use dormouse::EngineBuilder;

#[path = "../emulated_cuda/mod.rs"]
mod emulated_cuda;

use emulated_cuda::{Emulated, EmulatedDevice};

/// The GPU of a thread, and so of a test. When the thread ends, nothing may be left on it.
struct Gpu(EmulatedDevice);

thread_local! {
    static LEAKS: Cell<bool> = const { Cell::new(false) };
    static GPU: Gpu = Gpu(Emulated::load().adverse_device());
}

pub fn on_gpu(builder: EngineBuilder) -> EngineBuilder {
    GPU.with(|gpu| builder.cuda(gpu.0.ordinal.unsigned_abs()))
}

pub fn leaks_on_purpose() {
    LEAKS.set(true);
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let (violations, live) = (self.0.violations(), self.0.live());
        let leaked = (!live.is_empty() || self.0.used() > 0) && !LEAKS.get();
        if !violations.is_empty() || leaked {
            // The test is over already, so the whole program fails.
            let name = std::thread::current().name().unwrap_or("a thread").to_owned();
            eprintln!("{name}: the emulated GPU still has {live} ({} bytes); {violations:#?}", self.0.used());
            exit(101);
        }
    }
}
