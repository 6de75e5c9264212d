//! What is not there any more can't be read: a stale address is a fault, never old numbers.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use super::*;
use crate::engine::SleepOptions;

const WHICH: &str = "DORMOUSE_TEST_READS_UNMAPPED";
const SIGSEGV: i32 = 11;

/// The child: reads where weights or the KV cache were, after a sleep.
fn read_what_is_gone(which: &str) -> u8 {
    let gpu = Gpu::new();
    let engine = awake_on(gpu.device(), 1);
    engine.generate(&probe()).unwrap();
    let kv = engine.state.shared.between_steps(|serving| serving.executor.kv_address());
    let weights = engine.state.weights.arena().address();
    let address = if which.starts_with("kv") { kv } else { weights };
    let read = || crate::device::cuda::read_emulated(address);
    let before = read();
    match which {
        "kv, awake" | "weights, awake" => before,
        "kv, resident" | "weights, resident" => {
            let _asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
            read()
        }
        "weights, parked" => {
            let _asleep = engine.sleep(SleepOptions::default()).unwrap();
            read()
        }
        _ => {
            let _asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
            read()
        }
    }
}

#[test]
fn c19_a_read_through_a_stale_address_faults() {
    if let Ok(which) = std::env::var(WHICH) {
        std::process::exit(i32::from(read_what_is_gone(&which) == 0 && which.is_empty()));
    }
    for (which, faults) in [
        ("kv, awake", false),
        ("weights, awake", false),
        ("weights, resident", false),
        ("kv, resident", true),
        ("weights, parked", true),
        ("weights, discarded", true),
        ("kv, discarded", true),
    ] {
        let program = std::env::current_exe().unwrap();
        let name = "engine::tests::cuda::unmapped::c19_a_read_through_a_stale_address_faults";
        let child = Command::new(program).args(["--exact", name]).env(WHICH, which).output().unwrap();
        let signal = child.status.signal();
        let text = String::from_utf8_lossy(&child.stderr);
        assert_eq!(signal, faults.then_some(SIGSEGV), "{which}: {:?}\n{text}", child.status);
    }
}
