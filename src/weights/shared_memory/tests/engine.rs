//! The engine's side, and trainers that lie, stop, go or give up.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::super::message::readable;
use super::*;

const HALF: usize = 64;

fn held() -> Held {
    Held::of(&[20, 100, 7])
}

/// How far a trainer goes before it misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Greeted,
    Listed,
    FirstFilled,
    BothFilled,
    AllTaken,
}

const STAGES: [Stage; 5] =
    [Stage::Greeted, Stage::Listed, Stage::FirstFilled, Stage::BothFilled, Stage::AllTaken];

/// A trainer that did everything up to `stage`.
fn trainer_at(stage: Stage, stream: UnixStream) -> Trainer {
    let held = held();
    let mut trainer = Trainer::over(stream);
    if stage >= Stage::Listed {
        trainer.list(&held);
        assert!(matches!(trainer.hear(), FromEngine::Want { .. }));
    }
    let bytes = held.concatenated();
    let pieces: Vec<&[u8]> = bytes.chunks(HALF).collect();
    let count = match stage {
        Stage::Greeted | Stage::Listed => 0,
        Stage::FirstFilled => 1,
        Stage::BothFilled => 2,
        Stage::AllTaken => pieces.len(),
    };
    for (number, piece) in pieces[..count].iter().enumerate() {
        trainer.fill(number % 2, piece);
        if stage == Stage::AllTaken {
            assert!(matches!(trainer.hear(), FromEngine::Taken { .. }));
        }
    }
    if stage == Stage::AllTaken {
        assert_eq!(trainer.hear(), FromEngine::Finish {});
    }
    trainer
}

/// What the load makes of a trainer that goes to `stage` and then does `act`; what it holds at last is
/// kept until the load has ended.
fn load_from<T: Send>(
    stage: Stage,
    deadline: Duration,
    act: impl FnOnce(Trainer) -> T + Send,
) -> SharedMemoryError {
    let (mut source, theirs) = accepted(HALF, deadline);
    let error = std::thread::scope(|scope| {
        let (ended, wait) = std::sync::mpsc::channel::<()>();
        scope.spawn(move || {
            let kept = act(trainer_at(stage, theirs));
            let _ = wait.recv();
            drop(kept);
        });
        let error = shared(planned(&mut source).unwrap_err());
        drop(ended);
        error
    });
    assert_ended(&mut source);
    error
}

/// Every later call fails, at once.
fn assert_ended(source: &mut SharedMemorySource) {
    let begin = Instant::now();
    let ended = |error: SharedMemoryError| assert!(matches!(error, SharedMemoryError::Ended), "{error}");
    let version = WeightVersion { counter: 1, digest: WeightsDigest::from_bytes([0; 32]), label: None };
    ended(shared(source.index().unwrap_err()));
    ended(shared(source.plan(&[0]).unwrap_err()));
    ended(shared(source.read(0, &mut |_| panic!("nothing to read")).unwrap_err()));
    ended(shared(source.finish().unwrap_err()));
    ended(source.confirm(&version).unwrap_err());
    ended(source.refuse("why not").unwrap_err());
    ended(source.wait_for_offer(PATIENT).unwrap_err());
    assert!(begin.elapsed() < PATIENT / 2);
}

fn raw(stream: &mut UnixStream, length: u32, bytes: &[u8]) {
    stream.write_all(&length.to_le_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

/// Sends `text` as a message at `stage`; the load must name `expected`, and the trainer be told.
#[track_caller]
fn refuses(stage: Stage, text: &[u8], expected: &str) {
    refuses_raw(stage, text.len() as u32, text, expected);
}

#[track_caller]
fn refuses_raw(stage: Stage, length: u32, text: &[u8], expected: &str) {
    let text = text.to_vec();
    let error = load_from(stage, PATIENT, move |trainer| {
        let mut stream = trainer.channel.into_stream();
        raw(&mut stream, length, &text);
        // Refusals come behind the halves that were taken before.
        let channel = Channel::new(stream, PATIENT);
        loop {
            match channel.receive(MAX_WANT_BYTES, "a refusal").unwrap() {
                FromEngine::Refused { reason } => break assert!(!reason.is_empty()),
                FromEngine::Taken { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    });
    let SharedMemoryError::Violation(violation) = &error else { panic!("{error}") };
    assert!(violation.to_string().contains(expected), "{violation}");
}

/// A trainer that keeps the descriptor, or the mapping, keeps no memory of this process.
#[test]
fn the_memory_is_given_back_whoever_still_has_the_descriptor() {
    const BYTES: usize = 1 << 20;
    let (source, theirs) = accepted(BYTES / 2, PATIENT);
    let channel = Channel::new(theirs, PATIENT);
    let (_, descriptor) = channel.receive_with::<FromEngine>("welcome").unwrap();
    let file = std::fs::File::from(descriptor.unwrap());
    let held_bytes = || file.metadata().unwrap().blocks() * 512;
    assert_eq!((file.metadata().unwrap().len(), held_bytes()), (BYTES as u64, BYTES as u64));
    drop(source);
    assert_eq!((file.metadata().unwrap().len(), held_bytes()), (BYTES as u64, 0));
}

#[test]
fn c17_what_is_no_message_is_refused_at_every_stage() {
    for stage in STAGES {
        refuses(stage, b"", "no valid message");
        refuses(stage, b"{}", "no valid message");
        refuses(stage, b"{\"sent\":", "no valid message");
        refuses(stage, b"{\"sent\":{}} {}", "no valid message");
        refuses(stage, b"{\"sent\":{},\"sent\":{}}", "no valid message");
        refuses(stage, b"{\"sent\":{\"more\":1}}", "no valid message");
        refuses(stage, b"{\"filled\":{\"half\":0}}", "no valid message");
        refuses(stage, b"{\"filled\":{\"half\":-1,\"bytes\":1}}", "no valid message");
        refuses(stage, b"{\"filled\":{\"half\":0,\"bytes\":18446744073709551616}}", "no valid message");
        refuses(stage, b"{\"abort\":{\"reason\":\"\xff\"}}", "no valid message");
        refuses(stage, b"{\"welcome\":{\"protocol\":1,\"half_bytes\":64}}", "no valid message");
        refuses(stage, &[b'['; 5000], "no valid message");
        refuses_raw(stage, u32::MAX, b"", "4294967295 bytes");
        let limit = if stage == Stage::Greeted { 64 << 20 } else { 64 << 10 };
        refuses_raw(stage, limit + 1, b"", "at most");
    }
}

#[test]
fn c17_messages_out_of_order_are_refused() {
    for stage in STAGES {
        if stage != Stage::Greeted {
            refuses(stage, b"{\"index\":{\"tensors\":[]}}", "`index` where");
        }
        if stage != Stage::AllTaken {
            refuses(stage, b"{\"sent\":{}}", "`sent` where");
        }
    }
    refuses(Stage::Greeted, b"{\"filled\":{\"half\":0,\"bytes\":1}}", "`filled` where");
    refuses(Stage::AllTaken, b"{\"filled\":{\"half\":0,\"bytes\":1}}", "`filled` where");
}

#[test]
fn c17_impossible_halves_are_refused() {
    let filled = |half: u64, bytes: u64| format!("{{\"filled\":{{\"half\":{half},\"bytes\":{bytes}}}}}");
    for (stage, next) in [(Stage::Listed, 0), (Stage::FirstFilled, 1), (Stage::BothFilled, 0)] {
        // Less than full, where it is not the last: an update could be drawn out for ever.
        for bytes in [0, 1, 63, 65, u64::MAX] {
            refuses(stage, filled(next, bytes).as_bytes(), "filled with");
        }
        for half in [1 - next, 2, u64::MAX] {
            refuses(stage, filled(half, 1).as_bytes(), "out of turn");
        }
    }
    // More than was wanted: 254 bytes in halves of 64 leave 62 for the last.
    let error = load_from(Stage::BothFilled, PATIENT, |mut trainer| {
        trainer.fill(0, &[1; 64]);
        trainer.fill(1, &[1; 63]);
        trainer
    });
    let SharedMemoryError::Violation(violation) = error else { panic!("{error}") };
    let expected = ProtocolViolation::FilledBytes { bytes: 63, half_bytes: 64, wanted_bytes: 62 };
    assert_eq!(*violation, expected);
}

#[test]
fn c17_impossible_indices_are_refused() {
    let entry = |name: &str, dtype: &str, shape: &str| {
        format!(r#"{{"index":{{"tensors":[{{"name":"{name}","dtype":"{dtype}","shape":{shape}}}]}}}}"#)
    };
    let check = |text: String, expected| refuses(Stage::Greeted, text.as_bytes(), expected);
    check(entry("a", "I8", "[1]"), "no valid message");
    check(entry("a", "f32", "[1]"), "no valid message");
    check(entry("a", "F32", "[-1]"), "no valid message");
    check(entry("a", "F32", "[1.5]"), "no valid message");
    check(entry("a", "F32", "[1,1,1,1,1,1,1,1,1]"), "more than 8 elements");
    check(entry("a", "F32", "[4611686018427387904]"), "larger than memory can be");
    check(entry("a", "F16", "[4611686018427387904]"), "larger than memory can be");
    check(entry("a", "F16", "[4294967296,4294967296]"), "larger than memory can be");
    check(entry(&"n".repeat(1025), "F16", "[1]"), "its name is too long");
    let other = |name: &str, dtype: &str| {
        format!(r#"{{"index":{{"tensors":[],"unsupported":[{{"name":"{name}","dtype":"{dtype}"}}]}}}}"#)
    };
    check(other(&"n".repeat(1025), "i8"), "its name is too long");
    check(other("n", &"i".repeat(65)), "element type is too long");
    // One tensor too many, in one of the lists and in both together.
    let many = |count: usize| vec![r#"{"name":"","dtype":"i"}"#; count].join(",");
    check(format!(r#"{{"index":{{"tensors":[],"unsupported":[{}]}}}}"#, many((1 << 20) + 1)), "more than");
    let one = r#"{"name":"","dtype":"F16","shape":[]}"#;
    let both = format!(r#"{{"index":{{"tensors":[{one}],"unsupported":[{}]}}}}"#, many(1 << 20));
    check(both, "an index of 1048577 tensors");
}

#[test]
fn c17_descriptors_from_the_trainer_are_refused() {
    for stage in STAGES {
        let error = load_from(stage, PATIENT, |trainer| {
            let passed = std::fs::File::open("/dev/null").unwrap();
            trainer.channel.send_with(&FromTrainer::Sent {}, passed.as_fd()).unwrap();
            trainer
        });
        assert!(
            matches!(&error, SharedMemoryError::Violation(violation)
            if matches!(**violation, ProtocolViolation::Descriptors { received: 1, expected: 0 })),
            "{error}"
        );
    }
}

#[test]
fn c18_a_trainer_that_stalls_ends_in_a_deadline_at_every_stage() {
    for stage in STAGES {
        let begin = Instant::now();
        let error = load_from(stage, SHORT, |trainer| trainer);
        let SharedMemoryError::Deadline { waited, .. } = error else { panic!("{error}") };
        assert!(waited >= SHORT && begin.elapsed() < PATIENT / 2);
        // In the midst of a message.
        for bytes in [&[40, 0][..], &[40, 0, 0, 0], b"\x28\0\0\0{\"sent\""] {
            let error = load_from(stage, SHORT, |trainer| {
                let mut stream = trainer.channel.into_stream();
                stream.write_all(bytes).unwrap();
                stream
            });
            assert!(matches!(error, SharedMemoryError::Deadline { .. }), "{error}");
        }
    }
}

#[test]
fn c18_bytes_one_by_one_buy_no_time() {
    let begin = Instant::now();
    let error = load_from(Stage::Greeted, Duration::from_millis(200), |trainer| {
        let mut stream = trainer.channel.into_stream();
        stream.write_all(&(60_u32 << 20).to_le_bytes()).unwrap();
        // Ends when the engine closes the connection.
        while stream.write_all(b" ").is_ok() {
            std::thread::yield_now();
        }
    });
    let SharedMemoryError::Deadline { waited, .. } = error else { panic!("{error}") };
    assert!(waited < Duration::from_secs(5) && begin.elapsed() < PATIENT / 2, "{waited:?}");
}

#[test]
fn c18_a_trainer_that_goes_is_noticed_at_every_stage() {
    for stage in STAGES {
        let error = load_from(stage, PATIENT, drop);
        assert!(matches!(error, SharedMemoryError::Gone { .. }), "{stage:?}: {error}");
        // In the midst of a message.
        let error = load_from(stage, PATIENT, |trainer| {
            trainer.channel.into_stream().write_all(b"\x28\0\0\0{\"sent\"").unwrap();
        });
        assert!(matches!(error, SharedMemoryError::Gone { .. }), "{stage:?}: {error}");
    }
}

#[test]
fn c18_the_trainers_last_words_reach_the_load() {
    for stage in STAGES {
        let error = load_from(stage, PATIENT, |trainer| {
            trainer.say(&FromTrainer::Abort { reason: "the loss\u{7} is NaN".into() });
        });
        assert!(
            matches!(&error, SharedMemoryError::Aborted { reason } if reason == "the loss is NaN"),
            "{error}"
        );
    }
    assert_eq!(readable(&"é".repeat(9000)).chars().count(), 8000);
}

#[test]
fn calls_out_of_turn_change_nothing() {
    let mut held = held();
    let expected = held.digest();
    let out_of_turn =
        |error: SharedMemoryError| assert!(matches!(error, SharedMemoryError::OutOfTurn { .. }), "{error}");
    let (digest, sent) = transfer(&mut held, options(100), |source| {
        let version = WeightVersion { counter: 1, digest: expected, label: None };
        out_of_turn(source.confirm(&version).unwrap_err());
        out_of_turn(source.refuse("nothing").unwrap_err());
        out_of_turn(shared(source.finish().unwrap_err()));
        out_of_turn(shared(source.plan(&[]).unwrap_err()));
        let nowhere = source.read(0, &mut |_| {});
        assert!(matches!(nowhere, Err(SourceError::NoSuchTensor { tensor: 0, count: 0 })));
        let specs = source.index().unwrap();
        out_of_turn(shared(source.index().unwrap_err()));
        out_of_turn(source.confirm(&version).unwrap_err());
        let beyond = source.plan(&[0, 3]);
        assert!(matches!(beyond, Err(SourceError::NoSuchTensor { tensor: 3, count: 3 })));
        source.plan(&[0, 1, 2]).unwrap();
        out_of_turn(shared(source.plan(&[0]).unwrap_err()));
        out_of_turn(shared(source.read(1, &mut |_| {}).unwrap_err()));
        out_of_turn(shared(source.finish().unwrap_err()));
        let mut digests = Vec::new();
        for (tensor, spec) in specs.iter().enumerate() {
            let mut hasher = TensorHasher::new(spec);
            source.read(tensor, &mut |piece| hasher.update(piece)).unwrap();
            digests.push((spec.name.as_str(), hasher.finish()));
        }
        source.finish().unwrap();
        out_of_turn(shared(source.finish().unwrap_err()));
        source.confirm(&version).unwrap();
        WeightsDigest::combine(digests)
    });
    assert_eq!((digest, sent.unwrap().digest), (expected, expected));
}

#[test]
fn c18_a_panic_or_a_refusal_in_the_midst_ends_the_connection_on_both_sides() {
    let (_, sent) = transfer(&mut held(), options(HALF), |source| {
        let specs = source.index().unwrap();
        assert_eq!(specs.len(), 3);
        source.plan(&[0, 1, 2]).unwrap();
        let panics = catch_unwind(AssertUnwindSafe(|| source.read(0, &mut |_| panic!("no room"))));
        assert!(panics.is_err());
        assert_ended(source);
    });
    assert!(matches!(sent, Err(SharedMemoryError::Gone { .. })));

    let (mut source, theirs) = accepted(HALF, PATIENT);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut client = SharedMemoryClient::over(theirs, PATIENT).unwrap();
            let refused = client.send(&mut held()).unwrap_err();
            assert!(matches!(refused, SharedMemoryError::Refused { reason } if reason == "enough"));
            assert!(matches!(client.send(&mut held()), Err(SharedMemoryError::Ended)));
        });
        source.index().unwrap();
        source.plan(&[0, 1, 2]).unwrap();
        source.read(0, &mut |_| {}).unwrap();
        source.refuse("enough").unwrap();
        assert_ended(&mut source);
    });
}

/// Whoever has the memory may free its pages: they read as zeros, and nothing ends in a signal.
#[test]
fn b68_a_trainer_that_frees_the_memory_spoils_its_own_update_only() {
    let (mut source, theirs) = accepted(8192, PATIENT);
    let channel = Channel::new(theirs, PATIENT);
    let (_, memory) = channel.receive_with::<FromEngine>("welcome").unwrap();
    let memory = memory.unwrap();
    for bytes in [0, 1, 16_383, 1 << 20] {
        assert!(rustix::fs::ftruncate(&memory, bytes).is_err(), "the size is sealed");
    }
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&memory, punch, 0, 16_384).unwrap();
    channel.send(&FromTrainer::Index(Index::of(&held().specs(), &[]))).unwrap();
    channel.send(&FromTrainer::Filled { half: 0, bytes: 254 }).unwrap();
    channel.send(&FromTrainer::Sent {}).unwrap();
    let mut zeros = held();
    zeros.0.iter_mut().for_each(|(_, bytes)| bytes.fill(0));
    assert_eq!(planned(&mut source).unwrap(), zeros.digest());
}
