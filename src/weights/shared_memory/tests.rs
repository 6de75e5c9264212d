//! Both sides over a pair of sockets, one of them often a hand-written peer that stops or lies at a chosen
//! message. Two real processes are in `tests/shared_memory.rs`.

mod client;
mod engine;

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::channel::Channel;
use super::message::{FromEngine, FromTrainer, Index, MAX_WANT_BYTES};
use super::*;
use crate::device::SharedMapping;
use crate::weights::{
    DType, SourceError, TensorHasher, TensorSpec, WeightSource, WeightVersion, WeightsDigest,
};

/// Long enough for a busy machine, not for a test that hangs.
const PATIENT: Duration = Duration::from_secs(20);
/// For the peer that doesn't come.
const SHORT: Duration = Duration::from_millis(200);

/// Tensors in memory, handed out in pieces of changing size.
#[derive(Debug, Clone)]
struct Held(Vec<(TensorSpec, Vec<u8>)>);

impl Held {
    /// A tensor for each number of f16 elements.
    fn of(lengths: &[usize]) -> Self {
        let tensor = |(number, &length): (usize, &usize)| {
            let spec =
                TensorSpec { name: format!("tensor {number}"), dtype: DType::F16, shape: vec![length] };
            let bytes = (0..2 * length).map(|i| (i * 7 + i / 256 + number * 31) as u8).collect();
            (spec, bytes)
        };
        Self(lengths.iter().enumerate().map(tensor).collect())
    }

    fn specs(&self) -> Vec<TensorSpec> {
        self.0.iter().map(|(spec, _)| spec.clone()).collect()
    }

    fn concatenated(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect()
    }

    fn digest(&self) -> WeightsDigest {
        read_planned(&mut self.clone(), None).expect("memory can be read")
    }
}

impl WeightSource for Held {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.specs())
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let mut rest = &self.0[tensor].1[..];
        let mut size = 1;
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(rest.len().min(size));
            sink(piece);
            rest = later;
            size = size * 3 % 10_007;
        }
        Ok(())
    }
}

/// Lists and reads everything as a load does; `plan` chooses the order.
fn read_planned(
    source: &mut dyn WeightSource,
    plan: Option<&dyn Fn(usize) -> Vec<usize>>,
) -> Result<WeightsDigest, SourceError> {
    let specs = source.index()?;
    let order = match plan {
        Some(plan) => {
            let order = plan(specs.len());
            source.plan(&order)?;
            order
        }
        None => (0..specs.len()).collect(),
    };
    let mut digests = Vec::new();
    for tensor in order {
        let spec = &specs[tensor];
        let mut hasher = TensorHasher::new(spec);
        let mut received = 0;
        source.read(tensor, &mut |piece| {
            hasher.update(piece);
            received += piece.len();
        })?;
        assert_eq!(Some(received), spec.checked_bytes(), "{spec:?}");
        digests.push((spec.name.as_str(), hasher.finish()));
    }
    source.finish()?;
    Ok(WeightsDigest::combine(digests))
}

fn in_order(count: usize) -> Vec<usize> {
    (0..count).collect()
}

fn planned(source: &mut dyn WeightSource) -> Result<WeightsDigest, SourceError> {
    read_planned(source, Some(&in_order))
}

/// The engine's side, greeted, and the socket of the other.
fn accepted(half_bytes: usize, deadline: Duration) -> (SharedMemorySource, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (SharedMemorySource::accept(ours, SharedMemoryOptions { half_bytes, deadline }).unwrap(), theirs)
}

/// A trainer that does what a test tells it.
struct Trainer {
    channel: Channel,
    memory: SharedMapping,
    half_bytes: usize,
}

impl Trainer {
    fn over(stream: UnixStream) -> Self {
        let channel = Channel::new(stream, PATIENT);
        let (welcome, descriptor) = channel.receive_with("welcome").unwrap();
        let FromEngine::Welcome { protocol: 1, half_bytes } = welcome else { panic!("{welcome:?}") };
        let half_bytes = usize::try_from(half_bytes).unwrap();
        Self {
            channel,
            memory: SharedMapping::adopt(descriptor.unwrap(), 2 * half_bytes).unwrap(),
            half_bytes,
        }
    }

    fn say(&self, message: &FromTrainer) {
        self.channel.send(message).unwrap();
    }

    fn list(&self, held: &Held) {
        self.say(&FromTrainer::Index(Index::of(&held.specs(), &[])));
    }

    fn hear(&self) -> FromEngine {
        self.channel.receive(MAX_WANT_BYTES, "anything").unwrap()
    }

    fn fill(&mut self, half: usize, bytes: &[u8]) {
        self.memory.write(half * self.half_bytes, bytes);
        self.say(&FromTrainer::Filled { half: half as u64, bytes: bytes.len() as u64 });
    }
}

/// Sends `held` from a thread while `engine` does its part here.
fn transfer<T>(
    held: &mut (dyn WeightSource + Send),
    options: SharedMemoryOptions,
    engine: impl FnOnce(&mut SharedMemorySource) -> T,
) -> (T, Result<WeightVersion, SharedMemoryError>) {
    let (mut source, theirs) = accepted(options.half_bytes, options.deadline);
    std::thread::scope(|scope| {
        let trainer =
            scope.spawn(move || SharedMemoryClient::over(theirs, options.deadline).unwrap().send(held));
        let result = engine(&mut source);
        drop(source);
        (result, trainer.join().unwrap())
    })
}

fn shared(error: SourceError) -> SharedMemoryError {
    match error {
        SourceError::SharedMemory(error) => *error,
        other => panic!("{other}"),
    }
}

fn options(half_bytes: usize) -> SharedMemoryOptions {
    SharedMemoryOptions { half_bytes, deadline: PATIENT }
}

#[test]
fn b72_any_half_size_gives_the_digest_of_the_source_read_directly() {
    let tensor = 2 * 501;
    for lengths in [&[501, 501, 501][..], &[1, 0, 501, 33, 2000, 0], &[0], &[]] {
        let mut held = Held::of(lengths);
        let expected = held.digest();
        for half_bytes in [64, 65, tensor - 1, tensor, tensor + 1, 3 * tensor, 1 << 20] {
            let reversed = |count: usize| (0..count).rev().collect();
            let plans: [Option<&dyn Fn(usize) -> Vec<usize>>; 3] = [None, Some(&in_order), Some(&reversed)];
            for plan in plans {
                let version = WeightVersion { counter: 9, digest: expected, label: None };
                let (digest, sent) = transfer(&mut held, options(half_bytes), |source| {
                    let digest = read_planned(source, plan).unwrap();
                    source.confirm(&WeightVersion { counter: 9, digest, label: None }).unwrap();
                    digest
                });
                assert_eq!((digest, sent.unwrap()), (expected, version), "{lengths:?} {half_bytes}");
            }
        }
    }
}

#[test]
fn b72_windows_larger_than_one_arrive_whole() {
    let mut held = Held::of(&[1_700_001, 3]);
    let expected = held.digest();
    for half_bytes in [1 << 20, (1 << 20) + 1, 5 << 20] {
        let (digest, _) = transfer(&mut held, options(half_bytes), |source| planned(source).unwrap());
        assert_eq!(digest, expected);
    }
}

#[test]
fn b68_a_half_may_be_overwritten_as_soon_as_it_is_taken() {
    let held = Held::of(&[501, 77, 1000]);
    for half_bytes in [64, 500, 1002, 4096] {
        let (mut source, theirs) = accepted(half_bytes, PATIENT);
        let digest = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut trainer = Trainer::over(theirs);
                trainer.list(&held);
                assert!(matches!(trainer.hear(), FromEngine::Want { .. }));
                let bytes = held.concatenated();
                let mut pieces = bytes.chunks(half_bytes).enumerate();
                let mut filled = 0;
                // One half ahead, as far as there is one.
                for (number, piece) in pieces.by_ref().take(2) {
                    trainer.fill(number % 2, piece);
                    filled += 1;
                }
                let mut taken = 0;
                while taken < filled {
                    let half = taken % 2;
                    assert_eq!(trainer.hear(), FromEngine::Taken { half: half as u64 });
                    taken += 1;
                    trainer.memory.write(half * half_bytes, &vec![0xAB; half_bytes]);
                    if let Some((number, piece)) = pieces.next() {
                        trainer.fill(number % 2, piece);
                        filled += 1;
                    }
                }
                assert_eq!(trainer.hear(), FromEngine::Finish {});
                trainer.say(&FromTrainer::Sent {});
            });
            planned(&mut source).unwrap()
        });
        assert_eq!(digest, held.digest(), "halves of {half_bytes}");
    }
}

#[test]
fn c25_one_connection_carries_many_updates_and_refusals_between_them() {
    let (mut source, theirs) = accepted(100, PATIENT);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut client = SharedMemoryClient::over(theirs, PATIENT).unwrap();
            for round in 0..6 {
                let mut held = Held::of(&[30 + round, 5, 200]);
                let sent = client.send(&mut held);
                match round % 3 {
                    0 => assert_eq!(sent.unwrap().digest, held.digest()),
                    _ => assert!(
                        matches!(sent, Err(SharedMemoryError::Refused { reason }) if reason == "not\nthis one")
                    ),
                }
            }
        });
        for round in 0..6 {
            match round % 3 {
                0 => {
                    let digest = planned(&mut source).unwrap();
                    source.confirm(&WeightVersion { counter: round, digest, label: None }).unwrap();
                }
                1 => {
                    // Before anything was asked for.
                    assert!(source.wait_for_offer(PATIENT).unwrap());
                    source.index().unwrap();
                    source.refuse("not\nthis\u{1b} one").unwrap();
                }
                _ => {
                    // After everything has arrived.
                    planned(&mut source).unwrap();
                    source.refuse("not\nthis one").unwrap();
                }
            }
        }
    });
}

#[test]
fn halves_that_are_too_small_or_too_large_are_refused() {
    for half_bytes in [0, 1, 63] {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let refused = SharedMemorySource::accept(ours, options(half_bytes));
        assert!(matches!(refused, Err(SharedMemoryError::HalfTooSmall { .. })));
    }
    for half_bytes in [1 << 45, 1 << 60, usize::MAX / 2, usize::MAX] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let refused = SharedMemorySource::accept(ours, options(half_bytes));
        assert!(matches!(refused, Err(SharedMemoryError::Memory(_))), "{half_bytes}");
        let told = SharedMemoryClient::over(theirs, PATIENT);
        assert!(matches!(told, Err(SharedMemoryError::Refused { .. })), "{told:?}");
    }
}
