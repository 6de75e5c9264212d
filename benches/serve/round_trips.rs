//! Round trips of control requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dormouse::Request;
use dormouse::control::{AbortTarget, Controller, Handle, Operation};

use super::Options;
use super::common::Outcome;
use super::common::report::{Cell, Report};

/// Round trips with nothing to do, and with this many requests being generated.
pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome {
    let handle = Controller::spawn(options.engine()?);
    let times = options.times(2000, 200);
    let mut rows = Vec::new();
    for running in [0, 1, 16] {
        let load = Load::start(&handle, running);
        wait_until_running(&handle, running);
        for (name, no_op) in [("resume (a no-op)", true), ("status", false)] {
            let trips = trips(&handle, times, || if no_op { Operation::Resume } else { Operation::Status });
            let at = |percent: usize| trips[(trips.len() - 1) * percent / 100].as_secs_f64() * 1e6;
            rows.push(vec![
                Cell::Text(format!("{name}, {running} running")),
                Cell::Number(at(50), 1),
                Cell::Number(at(90), 1),
                Cell::Number(at(99), 1),
            ]);
        }
        load.stop(&handle)?;
    }
    let title = "Round trips of control requests, a thread that waits for each answer (us)";
    report.table("control", title, &["request", "median", "p90", "p99"], &rows);
    Ok(())
}

/// Requests that are generated over and over.
struct Load {
    over: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Result<(), String>>>,
}

impl Load {
    fn start(handle: &Handle, count: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let tokens = handle.limits().max_model_len.min(900) - 8;
        let client = |n: usize| {
            let (handle, over) = (handle.clone(), Arc::clone(&over));
            let request = Request::new(vec![1 + n as u32; 4]).max_new_tokens(tokens).ignore_eos(true);
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let generation = handle.submit(request.clone()).map_err(|error| error.to_string())?;
                    generation.wait().map_err(|error| error.to_string())?;
                }
                Ok(())
            })
        };
        let clients = (0..count).map(client).collect();
        Self { over, clients }
    }

    fn stop(self, handle: &Handle) -> Outcome {
        self.over.store(true, Ordering::Relaxed);
        // One that was just about to ask again asks once more.
        while self.clients.iter().any(|client| !client.is_finished()) {
            handle.abort(AbortTarget::All);
        }
        for client in self.clients {
            client.join().map_err(|_| "a client panicked")??;
        }
        Ok(())
    }
}

fn wait_until_running(handle: &Handle, count: usize) {
    while handle.status().engine.running != count {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sorted times, with a pause between them so that they meet the steps anywhere.
fn trips(handle: &Handle, times: usize, operation: impl Fn() -> Operation) -> Vec<Duration> {
    let mut trips: Vec<Duration> = (0..times)
        .map(|n| {
            std::thread::sleep(Duration::from_micros(200 + 37 * (n as u64 % 29)));
            let begin = Instant::now();
            let answer = handle.control(operation()).wait();
            assert!(answer.is_ok(), "a no-op is not refused");
            begin.elapsed()
        })
        .collect();
    trips.sort_unstable();
    trips
}
