//! What was timed, and the table of it.

use std::time::Duration;

use super::common::report::Cell;
use super::common::{gb_per_s, median};

/// One run; what has no parts has only a total.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Time {
    pub(crate) total: Duration,
    /// To begin: takes memory, and copies what an update doesn't bring.
    pub(crate) begin: Option<Duration>,
    /// To make the new weights current.
    pub(crate) commit: Option<Duration>,
}

impl From<Duration> for Time {
    fn from(total: Duration) -> Self {
        Self { total, ..Self::default() }
    }
}

#[derive(Debug)]
struct Entry {
    name: String,
    threads: usize,
    bytes: u64,
    runs: Vec<Time>,
}

/// All runs, by name and threads.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<Entry>);

impl Times {
    pub(crate) const COLUMNS: [&str; 9] =
        ["way", "threads", "MB", "ms", "begin ms", "commit ms", "GB/s", "x yardstick", "x memcpy"];

    /// Notes a run that took in `bytes`.
    pub(crate) fn note(&mut self, name: &str, threads: usize, bytes: u64, time: impl Into<Time>) {
        let entry = self.0.iter().position(|entry| (&*entry.name, entry.threads) == (name, threads));
        let entry = entry.unwrap_or_else(|| {
            self.0.push(Entry { name: name.into(), threads, bytes, runs: Vec::new() });
            self.0.len() - 1
        });
        self.0[entry].runs.push(time.into());
    }

    fn find(&self, name: &str, threads: usize) -> Option<&Entry> {
        self.0.iter().find(|entry| (&*entry.name, entry.threads) == (name, threads))
    }

    pub(crate) fn median_ms(&self, name: &str, threads: usize) -> f64 {
        self.find(name, threads).map_or(f64::NAN, |entry| entry.total().as_secs_f64() * 1e3)
    }

    /// The table: what runs on one thread, then on more; rates as multiples of those of `yardstick` and
    /// `memcpy`.
    pub(crate) fn rows(&self, yardstick: &str, memcpy: &str) -> Vec<Vec<Cell>> {
        let rate = |name| self.find(name, 1).map_or(f64::NAN, Entry::rate);
        let (yardstick, memcpy) = (rate(yardstick), rate(memcpy));
        let mut entries: Vec<&Entry> = self.0.iter().collect();
        entries.sort_by_key(|entry| entry.threads);
        let row = |entry: &&Entry| {
            let ms = |part: fn(&Time) -> Option<Duration>| match entry.runs.iter().map(part).collect() {
                Some(times) => Cell::Number(median(times).as_secs_f64() * 1e3, 2),
                None => Cell::Nothing,
            };
            let rate = entry.rate();
            vec![
                Cell::Text(entry.name.clone()),
                Cell::Number(entry.threads as f64, 0),
                Cell::Number(entry.bytes as f64 / 1e6, 1),
                Cell::Number(entry.total().as_secs_f64() * 1e3, 1),
                ms(|time| time.begin),
                ms(|time| time.commit),
                Cell::Number(rate, 2),
                Cell::Number(rate / yardstick, 2),
                Cell::Number(rate / memcpy, 2),
            ]
        };
        entries.iter().map(row).collect()
    }
}

impl Entry {
    fn total(&self) -> Duration {
        median(self.runs.iter().map(|run| run.total).collect())
    }

    fn rate(&self) -> f64 {
        gb_per_s(self.bytes, self.total())
    }
}
