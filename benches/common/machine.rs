//! What the machine is, and how fast it reads and copies memory.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use dormouse::SimdPath;

use super::{median, timed};

pub(crate) fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let name = field("model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    // Hypervisors often hide the product's name; family and model still tell the generation.
    match (field("cpu family"), field("model\t")) {
        (Some(family), Some(model)) => format!("{name} (family {family} model {model})"),
        _ => name,
    }
}

/// What the engine's own choice comes to on this machine.
pub(crate) fn simd_name(path: SimdPath) -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        match path {
            SimdPath::Auto if avx2 && avx512 => return "avx512",
            SimdPath::Auto | SimdPath::Avx2 if avx2 => return "avx2",
            _ => {}
        }
    }
    let _ = path;
    "portable"
}

/// The rate, GB/s, at which `threads` threads read a buffer of so many bytes, which should be much larger
/// than the caches (a virtual machine shares large ones with others): the best of some passes, as a limit
/// should be.
pub(crate) fn read_limit(threads: usize, bytes: usize, passes: usize) -> f64 {
    let words: Vec<u64> = (0..bytes / size_of::<u64>()).map(|i| i as u64).collect();
    let barrier = Barrier::new(threads);
    let part = words.len().div_ceil(threads);
    let best = std::thread::scope(|scope| {
        let read = |part: &[u64]| {
            let mut best = Duration::MAX;
            for _ in 0..passes {
                barrier.wait();
                let begin = Instant::now();
                black_box(sum(part));
                // The pass is over when the slowest is done.
                barrier.wait();
                best = best.min(begin.elapsed());
            }
            best
        };
        let readers: Vec<_> = words.chunks(part).map(|part| scope.spawn(move || read(part))).collect();
        readers.into_iter().filter_map(|reader| reader.join().ok()).max().unwrap_or(Duration::MAX)
    });
    bytes as f64 / best.as_secs_f64() / 1e9
}

/// The sum, in several chains so that it waits for memory only.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    for chunk in words.as_chunks::<32>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

/// How long a copy of so many bytes takes on one thread: into memory that was written before, and into
/// memory that the system has yet to give.
pub(crate) fn copy_times(bytes: usize, times: usize) -> (Duration, Duration) {
    let source: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
    let mut target = vec![1; bytes];
    let (mut warm, mut fresh) = (Vec::new(), Vec::new());
    for _ in 0..times {
        warm.push(timed(|| black_box(&mut target).copy_from_slice(black_box(&source))).1);
        fresh.push(timed(|| black_box(black_box(&source).clone())).1);
    }
    (median(warm), median(fresh))
}

/// Memory of this process that is resident now, bytes.
pub(crate) fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
