//! The trainer's side, and engines that lie, stop, go or give up; sources that fail.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::device::SharedMemory;
use crate::weights::UnsupportedTensor;

const HALF: usize = 64;

fn held() -> Held {
    Held::of(&[20, 100, 7])
}

/// How far an engine goes before it misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Greeted,
    Listed,
    Wanted,
    FirstTaken,
    Finished,
}

const STAGES: [Stage; 5] = [Stage::Greeted, Stage::Listed, Stage::Wanted, Stage::FirstTaken, Stage::Finished];

fn engine_at(stage: Stage, stream: UnixStream) -> Channel {
    let channel = Channel::new(stream, PATIENT);
    let memory = SharedMemory::create(2 * HALF).unwrap();
    channel
        .send_with(&FromEngine::Welcome { protocol: 1, half_bytes: HALF as u64 }, memory.descriptor())
        .unwrap();
    let hear = || channel.receive::<FromTrainer>(1 << 20, "anything").unwrap();
    if stage >= Stage::Listed {
        assert!(matches!(hear(), FromTrainer::Index(_)));
    }
    if stage >= Stage::Wanted {
        let tensors = serde_json::from_str("[0,1,2]").unwrap();
        channel.send(&FromEngine::Want { tensors }).unwrap();
    }
    let halves = match stage {
        Stage::FirstTaken => 1,
        Stage::Finished => 4,
        _ => 0,
    };
    for number in 0..halves {
        let FromTrainer::Filled { half, .. } = hear() else { panic!("a half") };
        assert_eq!(half, number % 2);
        channel.send(&FromEngine::Taken { half }).unwrap();
    }
    if stage == Stage::Finished {
        channel.send(&FromEngine::Finish {}).unwrap();
        assert_eq!(hear(), FromTrainer::Sent {});
    }
    channel
}

/// What the client makes of an engine that goes to `stage` and then does `act`.
fn send_to<T: Send>(
    stage: Stage,
    deadline: Duration,
    act: impl FnOnce(Channel) -> T + Send,
) -> Result<WeightVersion, SharedMemoryError> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let (ended, wait) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            let kept = act(engine_at(stage, theirs));
            let _ = wait.recv();
            drop(kept);
        });
        let mut client = SharedMemoryClient::over(ours, deadline).unwrap();
        let sent = client.send(&mut held());
        if sent.is_err() && !matches!(sent, Err(SharedMemoryError::Refused { .. })) {
            assert!(matches!(client.send(&mut held()), Err(SharedMemoryError::Ended)));
        }
        drop(ended);
        sent
    })
}

#[test]
fn c18_an_engine_that_stalls_or_goes_is_noticed_at_every_stage() {
    for stage in STAGES {
        let stalled = send_to(stage, SHORT, |channel| channel);
        assert!(matches!(stalled, Err(SharedMemoryError::Deadline { .. })), "{stage:?}: {stalled:?}");
        let gone = send_to(stage, PATIENT, drop);
        assert!(matches!(gone, Err(SharedMemoryError::Gone { .. })), "{stage:?}: {gone:?}");
        let refused = send_to(stage, PATIENT, |channel| {
            channel.send(&FromEngine::Refused { reason: "no".into() }).unwrap();
        });
        assert!(
            matches!(&refused, Err(SharedMemoryError::Refused { reason }) if reason == "no"),
            "{refused:?}"
        );
    }
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let silent = SharedMemoryClient::over(ours, SHORT);
    assert!(matches!(silent, Err(SharedMemoryError::Deadline { .. })));
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    assert!(matches!(SharedMemoryClient::over(ours, PATIENT), Err(SharedMemoryError::Gone { .. })));
}

/// An engine that doesn't read an index that no socket buffer holds.
#[test]
fn c18_an_engine_that_does_not_read_ends_in_a_deadline() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let channel = engine_at(Stage::Greeted, theirs);
    let mut client = SharedMemoryClient::over(ours, SHORT).unwrap();
    let mut large = Held::of(&vec![0; 40_000]);
    let stalled = client.send(&mut large);
    assert!(matches!(stalled, Err(SharedMemoryError::Deadline { .. })), "{stalled:?}");
    drop(channel);
}

#[test]
fn c17_an_engine_that_breaks_the_protocol_is_refused_and_told() {
    let check = |stage, message: FromEngine, expected: &str| {
        let sent = send_to(stage, PATIENT, |channel| {
            channel.send(&message).unwrap();
            loop {
                match channel.receive(1 << 20, "the trainer's words").unwrap() {
                    FromTrainer::Abort { reason } => break assert!(!reason.is_empty()),
                    FromTrainer::Sent {} => panic!("sent"),
                    _ => {}
                }
            }
        });
        let Err(SharedMemoryError::Violation(violation)) = sent else { panic!("{sent:?}") };
        assert!(violation.to_string().contains(expected), "{violation}");
    };
    let want = |text: &str| FromEngine::Want { tensors: serde_json::from_str(text).unwrap() };
    check(Stage::Listed, want("[0,3]"), "tensor 3 is wanted");
    check(Stage::Listed, want("[18446744073709551615]"), "is wanted");
    check(Stage::Listed, FromEngine::Taken { half: 0 }, "`taken` where");
    check(Stage::Wanted, FromEngine::Taken { half: 1 }, "out of turn");
    check(Stage::Wanted, FromEngine::Taken { half: u64::MAX }, "out of turn");
    check(Stage::FirstTaken, FromEngine::Taken { half: 0 }, "out of turn");
    check(Stage::Wanted, FromEngine::Finish {}, "`finish` where");
    check(Stage::Wanted, want("[0]"), "`want` where");
    let digest = WeightsDigest::from_bytes([0; 32]);
    let committed = FromEngine::Committed(WeightVersion { counter: 1, digest, label: None });
    check(Stage::Wanted, committed, "`committed` where");
    check(Stage::Finished, FromEngine::Welcome { protocol: 1, half_bytes: 64 }, "`welcome` where");
}

/// A memory file of `bytes`, sealed so.
fn file(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn c17_a_greeting_with_the_wrong_memory_is_refused() {
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let check = |protocol, half_bytes, descriptor: Option<&dyn AsFd>, expected: &str| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let engine = Channel::new(theirs, PATIENT);
        let welcome = FromEngine::Welcome { protocol, half_bytes };
        match descriptor {
            Some(descriptor) => engine.send_with(&welcome, descriptor.as_fd()).unwrap(),
            None => engine.send(&welcome).unwrap(),
        }
        let refused = SharedMemoryClient::over(ours, PATIENT).unwrap_err();
        let SharedMemoryError::Violation(violation) = &refused else { panic!("{refused}") };
        assert!(violation.to_string().contains(expected), "{violation}");
        let told = engine.receive::<FromTrainer>(1 << 16, "the trainer's words").unwrap();
        assert!(matches!(told, FromTrainer::Abort { .. }));
    };
    let good = file(128, sealed);
    check(2, 64, Some(&good), "version 2");
    check(1, 63, Some(&good), "halves of 63");
    check(1, 0, Some(&good), "halves of 0");
    check(1, u64::MAX, Some(&good), "not possible");
    check(1, 65, Some(&good), "128 bytes instead of 130");
    check(1, 1 << 40, Some(&good), "128 bytes instead of");
    check(1, 64, None, "0 descriptors");
    check(1, 64, Some(&file(128, SealFlags::GROW)), "not sealed");
    check(1, 64, Some(&file(128, SealFlags::SHRINK)), "not sealed");
    check(1, 64, Some(&file(128, sealed | SealFlags::WRITE)), "against writing");
    check(1, 64, Some(&std::fs::File::open("/dev/null").unwrap()), "no memory file");
    check(1, 64, Some(&UnixStream::pair().unwrap().0), "no memory file");
}

#[test]
fn c17_more_descriptors_than_one_are_refused() {
    for count in [2, 3, 5] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let good = file(128, SealFlags::SHRINK | SealFlags::GROW);
        let text = b"{\"welcome\":{\"protocol\":1,\"half_bytes\":64}}";
        let message = [&(text.len() as u32).to_le_bytes()[..], text].concat();
        let passed = vec![good.as_fd(); count];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&passed)));
        let pieces = [std::io::IoSlice::new(&message)];
        rustix::net::sendmsg(&theirs, &pieces, &mut control, rustix::net::SendFlags::empty()).unwrap();
        let refused = SharedMemoryClient::over(ours, PATIENT).unwrap_err();
        assert!(refused.to_string().contains("descriptors or more"), "{refused}");
    }
}

/// A source that fails somewhere, or delivers too little or too much.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Index,
    Plan,
    Read,
    ReadHalf,
    Finish,
    Short,
    Long,
    Panic,
}

struct Faulty(Held, Fault);

fn fault() -> Result<(), SourceError> {
    Err(SourceError::Custom("the disk is on fire".into()))
}

impl WeightSource for Faulty {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        if matches!(self.1, Fault::Index) {
            fault()?;
        }
        self.0.index()
    }
    fn plan(&mut self, _: &[usize]) -> Result<(), SourceError> {
        if matches!(self.1, Fault::Plan) { fault() } else { Ok(()) }
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let bytes = &self.0.0[tensor].1;
        match self.1 {
            Fault::Read if tensor == 1 => fault(),
            Fault::ReadHalf if tensor == 1 => {
                sink(&bytes[..bytes.len() / 2]);
                fault()
            }
            Fault::Short if tensor == 1 => {
                sink(&bytes[1..]);
                Ok(())
            }
            Fault::Long if tensor == 1 => {
                sink(bytes);
                sink(&[1]);
                Ok(())
            }
            Fault::Panic if tensor == 1 => panic!("a source that panics"),
            _ => self.0.read(tensor, sink),
        }
    }
    fn finish(&mut self) -> Result<(), SourceError> {
        if matches!(self.1, Fault::Finish) { fault() } else { Ok(()) }
    }
}

#[test]
fn c18_a_source_that_fails_is_reported_on_both_sides_in_its_words() {
    for half_bytes in [64, 4096] {
        for kind in [Fault::Index, Fault::Plan, Fault::Read, Fault::ReadHalf, Fault::Finish] {
            let (loaded, sent) = transfer(&mut Faulty(held(), kind), options(half_bytes), |source| {
                shared(planned(source).unwrap_err())
            });
            assert!(matches!(sent, Err(SharedMemoryError::Source(_))), "{kind:?}: {sent:?}");
            assert!(
                matches!(&loaded, SharedMemoryError::Aborted { reason } if reason == "the disk is on fire"),
                "{kind:?}: {loaded}"
            );
        }
        for kind in [Fault::Short, Fault::Long] {
            let (loaded, sent) = transfer(&mut Faulty(held(), kind), options(half_bytes), |source| {
                shared(planned(source).unwrap_err())
            });
            assert!(matches!(sent, Err(SharedMemoryError::WrongLength { .. })), "{kind:?}: {sent:?}");
            assert!(loaded.to_string().contains("200 bytes expected"), "{kind:?}: {loaded}");
        }
    }
}

#[test]
fn c18_a_source_that_panics_takes_its_connection_along() {
    let (mut source, theirs) = accepted(64, PATIENT);
    let trainer = std::thread::spawn(move || {
        let mut client = SharedMemoryClient::over(theirs, PATIENT).unwrap();
        let send = || client.send(&mut Faulty(held(), Fault::Panic)).is_ok();
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(send));
        assert!(panics.is_err());
        assert!(matches!(client.send(&mut held()), Err(SharedMemoryError::Ended)));
    });
    let error = shared(planned(&mut source).unwrap_err());
    assert!(matches!(error, SharedMemoryError::Gone { .. }), "{error}");
    trainer.join().unwrap();
}

#[test]
fn tensors_of_other_types_and_a_socket_that_is_not_there_are_reported() {
    struct Quantized;
    impl WeightSource for Quantized {
        fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
            Ok(Vec::new())
        }
        fn unsupported(&self) -> &[UnsupportedTensor] {
            static OTHERS: std::sync::LazyLock<Vec<UnsupportedTensor>> =
                std::sync::LazyLock::new(|| vec![UnsupportedTensor { name: "q".into(), dtype: "I4".into() }]);
            &OTHERS
        }
        fn read(&mut self, _: usize, _: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
            Ok(())
        }
    }
    let (others, sent) = transfer(&mut Quantized, options(64), |source| {
        assert!(source.index().unwrap().is_empty());
        let others = source.unsupported().to_vec();
        source.refuse("quantized").unwrap();
        others
    });
    assert_eq!(others, [UnsupportedTensor { name: "q".into(), dtype: "I4".into() }]);
    assert!(matches!(sent, Err(SharedMemoryError::Refused { .. })));

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let nobody = SharedMemoryClient::connect(&path, PATIENT);
    assert!(matches!(nobody, Err(SharedMemoryError::Connect { .. })));
    let listener = UnixListener::bind(&path).unwrap();
    let unheard = SharedMemoryClient::connect(&path, SHORT);
    assert!(matches!(unheard, Err(SharedMemoryError::Deadline { .. })));
    drop(listener);
}
