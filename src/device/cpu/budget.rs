//! How much memory a device may commit: its own limit, and what the system has left.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::device::DeviceError;

/// The bytes committed by all arenas of one device.
#[derive(Debug)]
pub(crate) struct Budget {
    limit_bytes: Option<u64>,
    committed_bytes: Mutex<u64>,
    /// Commits and adoptions until one fails; 0 when none is to fail.
    fault_in: AtomicU64,
}

impl Budget {
    /// Nothing committed yet, of at most `limit_bytes`.
    pub(super) fn new(limit_bytes: Option<u64>) -> Self {
        Self { limit_bytes, committed_bytes: Mutex::new(0), fault_in: AtomicU64::new(0) }
    }

    /// Makes the `n`-th commit or adoption from now fail with [`DeviceError::OutOfMemory`] (1 is the next;
    /// 0 cancels). For the crate's fault-injection tests.
    #[cfg(test)]
    pub(crate) fn fail_nth(&self, n: u64) {
        self.fault_in.store(n, Ordering::Relaxed);
    }

    /// Bytes committed now.
    #[cfg(test)]
    pub(crate) fn committed_bytes(&self) -> u64 {
        *self.committed_bytes.lock()
    }

    /// Counts `bytes` as committed, if the limit and the system have them.
    pub(super) fn take(&self, label: &'static str, bytes: u64) -> Result<(), DeviceError> {
        self.check_fault(label, bytes)?;
        let mut committed = self.committed_bytes.lock();
        let available = self.available_bytes(*committed);
        if bytes > available {
            return Err(DeviceError::OutOfMemory { label, needed_bytes: bytes, available_bytes: available });
        }
        *committed += bytes;
        Ok(())
    }

    /// Gives back what [`Budget::take`] counted.
    pub(super) fn give_back(&self, bytes: u64) {
        *self.committed_bytes.lock() -= bytes;
    }

    /// Fails if this is the call that a test chose.
    pub(super) fn check_fault(&self, label: &'static str, bytes: u64) -> Result<(), DeviceError> {
        let before = self
            .fault_in
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(1)))
            .unwrap_or_default();
        if before == 1 {
            return Err(DeviceError::OutOfMemory { label, needed_bytes: bytes, available_bytes: 0 });
        }
        Ok(())
    }

    fn available_bytes(&self, committed: u64) -> u64 {
        let limit = self.limit_bytes.map_or(u64::MAX, |limit| limit.saturating_sub(committed));
        // Committed pages take memory only when first touched: those to come are spoken for. The process's
        // resident size bounds from above what was touched.
        let untouched = committed.saturating_sub(resident_bytes().unwrap_or(u64::MAX));
        limit.min(system_available_bytes().saturating_sub(untouched))
    }
}

/// Bytes that the system could give this process without swapping; `u64::MAX` if it doesn't say.
pub(in crate::device) fn system_available_bytes() -> u64 {
    let memory = read_field(Path::new("/proc/meminfo"), "MemAvailable:").map_or(u64::MAX, |kib| kib << 10);
    memory.min(control_group_available_bytes().unwrap_or(u64::MAX))
}

/// Resident bytes of this process.
pub(super) fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// The least that the (version 2) control groups of this process have left, their page cache counted as free.
fn control_group_available_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let innermost: PathBuf = root.join(group);
    innermost.ancestors().take_while(|path| path.starts_with(root)).filter_map(group_available_bytes).min()
}

fn group_available_bytes(group: &Path) -> Option<u64> {
    let number =
        |name: &str| -> Option<u64> { std::fs::read_to_string(group.join(name)).ok()?.trim().parse().ok() };
    // `memory.max` reads "max" where there is no limit, which is no number.
    let limit = number("memory.max")?;
    let current = number("memory.current")?;
    let stat = group.join("memory.stat");
    let cache = ["inactive_file", "active_file"].iter().filter_map(|name| read_field(&stat, name)).sum();
    Some(limit.saturating_sub(current.saturating_sub(cache)))
}

/// The number after the word `name` at the start of a line.
fn read_field(path: &Path, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        if words.next()? != name {
            return None;
        }
        words.next()?.parse().ok()
    })
}
