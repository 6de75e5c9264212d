//! Who waits for what: a wait that takes too long ends the test with a list of all.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dormouse::control::Handle;

/// Longest wait of anybody for anything.
const BOUND: Duration = Duration::from_secs(20);

#[derive(Default)]
pub struct Watch {
    waits: Mutex<Waits>,
}

#[derive(Default)]
struct Waits {
    next: u64,
    open: BTreeMap<u64, (Instant, String)>,
    over: bool,
}

/// A wait that has not ended.
pub struct Waiting<'a>(&'a Watch, u64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waits.lock().unwrap().open.remove(&self.1);
    }
}

/// Ends the watch when it is dropped.
pub struct Ends<'a>(pub &'a Watch);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.waits.lock().unwrap().over = true;
    }
}

impl Watch {
    pub fn begin(&self, what: String) -> Waiting<'_> {
        let mut waits = self.waits.lock().unwrap();
        waits.next += 1;
        let number = waits.next;
        waits.open.insert(number, (Instant::now(), what));
        Waiting(self, number)
    }

    /// Looks after the waits, until the end.
    pub fn look(self: &Arc<Self>, handle: &Handle, seed: u64) {
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let waits = self.waits.lock().unwrap();
            if waits.over {
                return;
            }
            if waits.open.values().all(|(since, _)| since.elapsed() < BOUND) {
                continue;
            }
            // Past the capture of the test's output: nobody ends this test any more.
            let mut out = std::io::stderr();
            writeln!(out, "seed {seed}: a wait takes over {BOUND:?}").unwrap();
            for (since, what) in waits.open.values() {
                writeln!(out, "{:?}: {what}", since.elapsed()).unwrap();
            }
            writeln!(out, "{:#?}", handle.status()).unwrap();
            std::process::exit(101);
        }
    }
}
