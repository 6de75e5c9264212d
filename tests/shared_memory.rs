//! Weights from a second process: this test binary, started again. It is killed at random and at every
//! message, stalls, or plays the engine and dies. Tests are named after their case, and take turns: they
//! count descriptors and mappings.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[path = "common/cycle.rs"]
mod cycle;
#[path = "common/trainer.rs"]
mod trainer;

use std::io::{BufRead as _, BufReader, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{Weights, bits};
use cycle::{assert_like_fresh, engine, request, weights};
use dormouse::{
    Awake, Engine, Failed, Kept, LoadError, SharedMemoryClient, SharedMemoryError, SharedMemoryOptions,
    SharedMemorySource, SleepOptions, Sleeping, SourceError, TensorSpec, TransferError, WeightSource,
    WeightVersion, WeightsLoaded,
};

/// Long enough for a busy machine.
const PATIENT: Duration = Duration::from_secs(20);
/// The tiny model's tensors take several halves, and some share one.
const HALF_BYTES: usize = 16 << 10;
/// What the second process is to do, in words.
const ROLE: &str = "DORMOUSE_TEST_ROLE";

static TURN: Mutex<()> = Mutex::new(());

fn my_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The other process: started by the tests below, which say what it is.
#[test]
#[ignore = "the second process of the other tests"]
fn second_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [role, socket, number] = words[..] else { panic!("{role}") };
    let number: u64 = number.parse().unwrap();
    match role {
        "client" => {
            let mut client = SharedMemoryClient::connect(socket, PATIENT).unwrap();
            for _ in 0..number {
                match client.send(&mut Slow(weights(2).source())) {
                    Ok(WeightVersion { counter, digest, .. }) => println!("\n> {counter} {digest}"),
                    Err(error) => println!("\n> {error}"),
                }
            }
        }
        "trainer" => trainer::run(Path::new(socket), &weights(2), &mut Moments { left: number, passed: 0 }),
        "engine" => play_engine(socket, number),
        _ => panic!("{role}"),
    }
}

/// Counts moments; the process stops for ever at one of them.
pub(crate) struct Moments {
    left: u64,
    passed: u64,
}

impl Moments {
    pub(crate) fn pass(&mut self) {
        if self.left == 0 {
            println!("\n> stopped");
            loop {
                std::thread::park();
            }
        }
        self.left -= 1;
        self.passed += 1;
    }
}

/// A source that takes its time, so that a random moment is somewhere in it.
struct Slow<S>(S);

impl<S: WeightSource> WeightSource for Slow<S> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.0.index()
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        std::thread::sleep(Duration::from_millis(1));
        self.0.read(tensor, sink)
    }
}

/// An engine's process that stops at a moment.
fn play_engine(socket: &str, moment: u64) {
    let mut moments = Moments { left: moment, passed: 0 };
    let listener = UnixListener::bind(socket).unwrap();
    moments.pass();
    let (stream, _) = listener.accept().unwrap();
    moments.pass();
    let mut source = SharedMemorySource::accept(stream, options(PATIENT)).unwrap();
    moments.pass();
    let count = source.index().unwrap().len();
    moments.pass();
    source.plan(&(0..count).collect::<Vec<_>>()).unwrap();
    moments.pass();
    for tensor in 0..count {
        source
            .read(tensor, &mut |_| {
                if tensor == count / 2 {
                    moments.pass();
                }
            })
            .unwrap();
    }
    moments.pass();
    source.finish().unwrap();
    moments.pass();
}

/// Moments of [`play_engine`].
const ENGINE_MOMENTS: u64 = 8;

/// The second process, killed when dropped.
struct Second {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Second {
    fn start(role: &str, socket: &Path, number: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "second_process", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{role} {} {number}", socket.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next thing it says; `None` when it has ended.
    fn says(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(said) = line.strip_prefix("> ") {
                return Some(said.trim_end().to_owned());
            }
        }
    }

    /// `kill -9`.
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Socket {
    path: PathBuf,
    listener: UnixListener,
    _directory: tempfile::TempDir,
}

impl Socket {
    fn bind() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weights.socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Self { path, listener, _directory: directory }
    }

    /// The next connection; `None` if there is none and `over` is true.
    fn accept(&self, over: &AtomicBool) -> Option<UnixStream> {
        let begin = Instant::now();
        loop {
            let last = over.load(Ordering::Acquire);
            match self.listener.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(fault) if fault.kind() == ErrorKind::WouldBlock => {}
                Err(fault) => panic!("{fault}"),
            }
            if last {
                return None;
            }
            assert!(begin.elapsed() < PATIENT, "nobody connects");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

fn options(deadline: Duration) -> SharedMemoryOptions {
    SharedMemoryOptions { half_bytes: HALF_BYTES, deadline }
}

fn shared(error: LoadError) -> SharedMemoryError {
    let source = match error {
        LoadError::Source(source) => source,
        LoadError::Transfer(TransferError::Source(source)) => source,
        other => panic!("{other}"),
    };
    match source {
        SourceError::SharedMemory(error) => *error,
        other => panic!("{other}"),
    }
}

type Loaded = Result<Engine<WeightsLoaded>, Failed<Sleeping<Kept>, LoadError>>;

/// An engine with weights `w0` that is put to sleep, loaded, and compared with what it said before.
struct Subject {
    w0: Weights,
    digest: dormouse::WeightsDigest,
    before: Vec<(Vec<u32>, Vec<u32>)>,
    /// What the trainer's weights say.
    after: Vec<(Vec<u32>, Vec<u32>)>,
    engine: Option<Engine<Awake>>,
    committed: usize,
    failed: usize,
}

impl Subject {
    fn new() -> Self {
        let w0 = weights(1);
        let engine = engine(&w0);
        let digest = engine.version().digest;
        let say = |engine: &Engine<Awake>| bits(&engine.generate(&[request(1)]).unwrap()[0]);
        let (before, after) = (say(&engine), say(&cycle::engine(&weights(2))));
        assert_ne!(before, after);
        Self { w0, digest, before, after, engine: Some(engine), committed: 0, failed: 0 }
    }

    fn says(engine: &Engine<Awake>) -> Vec<(Vec<u32>, Vec<u32>)> {
        bits(&engine.generate(&[request(1)]).unwrap()[0])
    }

    /// Puts the engine to sleep and loads; whatever comes of it, the engine has old weights or new ones.
    fn load(&mut self, load: impl FnOnce(Engine<Sleeping<Kept>>) -> Loaded) -> Option<SharedMemoryError> {
        let asleep = self.engine.take().unwrap().sleep(SleepOptions::default().resident()).unwrap();
        let memory = asleep.memory();
        let (engine, error) = match load(asleep) {
            Ok(loaded) => {
                let engine = loaded.wake_up().unwrap();
                assert_eq!(Self::says(&engine), self.after);
                self.committed += 1;
                let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
                (asleep.load_weights(self.w0.source()).unwrap().wake_up().unwrap(), None)
            }
            Err(failed) => {
                let (asleep, error) = failed.into_parts();
                assert_eq!(asleep.memory(), memory);
                self.failed += 1;
                (asleep.restore_weights().unwrap().wake_up().unwrap(), Some(shared(error)))
            }
        };
        assert_eq!(engine.version().digest, self.digest);
        assert_eq!(Self::says(&engine), self.before);
        self.engine = Some(engine);
        error
    }

    /// Loads from whoever connects before `over`; `None` if nobody does, or is gone before the greeting.
    fn load_from(&mut self, socket: &Socket, over: &AtomicBool) -> Option<SharedMemoryError> {
        let stream = socket.accept(over)?;
        let mut source = match SharedMemorySource::accept(stream, options(PATIENT)) {
            Ok(source) => source,
            Err(error) => return Some(error),
        };
        let begin = Instant::now();
        let error = self.load(|asleep| {
            let loaded = asleep.load_weights(&mut source)?;
            // The trainer may be dead by now; the weights are here.
            let _ = source.confirm(&loaded.report().version);
            Ok(loaded)
        });
        assert!(begin.elapsed() < PATIENT / 2, "a dead trainer is noticed at once");
        error
    }

    /// A load from a healthy second process.
    fn load_well(&mut self, socket: &Socket) {
        let mut second = Second::start("client", &socket.path, 1);
        let committed = self.committed;
        assert!(self.load_from(socket, &AtomicBool::new(false)).is_none());
        assert_eq!(self.committed, committed + 1);
        assert!(second.says().unwrap().ends_with(&weights_digest(&weights(2))));
    }
}

fn weights_digest(weights: &Weights) -> String {
    engine(weights).version().digest.to_string()
}

/// Descriptors of this process, and mappings of shared memory.
fn handles() -> [usize; 2] {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.contains("memfd")).count();
    [std::fs::read_dir("/proc/self/fd").unwrap().count(), mapped]
}

/// Resident bytes of this process.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_ascii_whitespace().nth(1).unwrap().parse::<i64>().unwrap() * 4096
}

#[test]
fn c13_weights_of_another_process_answer_like_a_fresh_engine() {
    let _turn = my_turn();
    let socket = Socket::bind();
    let before = handles();
    let mut second = Second::start("client", &socket.path, 3);
    let stream = socket.accept(&AtomicBool::new(false)).unwrap();
    let mut source = SharedMemorySource::accept(stream, options(PATIENT)).unwrap();
    let w2 = weights(2);
    let mut check = |loaded: Engine<WeightsLoaded>, source: &mut SharedMemorySource| {
        let version = loaded.report().version.clone();
        source.confirm(&version).unwrap();
        assert_eq!(second.says().unwrap(), format!("{} {}", version.counter, version.digest));
        assert_like_fresh(&loaded.wake_up().unwrap(), &w2, &request(1));
    };
    let asleep = || engine(&weights(1));
    let discarded = asleep().sleep_discarding(SleepOptions::default()).unwrap();
    check(discarded.load_weights(&mut source).unwrap(), &mut source);
    let parked = asleep().sleep(SleepOptions::default()).unwrap();
    check(parked.load_weights(&mut source).unwrap(), &mut source);
    let resident = asleep().sleep(SleepOptions::default().resident()).unwrap();
    check(resident.load_weights(&mut source).unwrap(), &mut source);
    drop((source, second));
    assert_eq!(handles(), before);
}

#[test]
fn c17_a_set_that_does_not_fit_is_refused_in_the_other_process_too() {
    let _turn = my_turn();
    let socket = Socket::bind();
    let mut second = Second::start("client", &socket.path, 2);
    let stream = socket.accept(&AtomicBool::new(false)).unwrap();
    let mut source = SharedMemorySource::accept(stream, options(PATIENT)).unwrap();
    // A tied model of half precision takes none of it.
    let other = common::tiny_weights(true, dormouse::DType::F16, 1);
    let other = common::awake(common::tiny_builder(true, dormouse::DType::F16), &other);
    let failed = other.sleep(SleepOptions::default()).unwrap().load_weights(&mut source).unwrap_err();
    let LoadError::Mismatch(mismatch) = &failed.error else { panic!("{}", failed.error) };
    assert!(mismatch.num_faults() > 10);
    source.refuse(&failed.error).unwrap();
    let said = second.says().unwrap();
    assert!(said.starts_with("refused by the engine: "), "{said}");
    // The connection goes on.
    let asleep = engine(&weights(1)).sleep(SleepOptions::default()).unwrap();
    let loaded = asleep.load_weights(&mut source).unwrap();
    source.confirm(&loaded.report().version).unwrap();
    assert!(second.says().unwrap().ends_with(&loaded.report().version.digest.to_string()));
}

/// How a child that was killed may look: it is gone, or was before it was greeted.
#[track_caller]
fn assert_gone(error: &SharedMemoryError) {
    assert!(matches!(error, SharedMemoryError::Gone { .. }), "{error}");
}

#[test]
fn c13_c18_b62_a_trainer_killed_at_random_changes_nothing_and_leaves_nothing() {
    let _turn = my_turn();
    let seed = std::env::var("SEED").map_or(0x5eed, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let mut random: u64 = seed * 2 + 1;
    let socket = Socket::bind();
    let mut subject = Subject::new();
    subject.load_well(&socket);
    // The time from start to commit, of a run that isn't the first.
    let begin = Instant::now();
    subject.load_well(&socket);
    let whole = begin.elapsed();
    let (mut first, mut before) = (0, [0; 2]);
    let mut unconnected = 0;
    for kill in 0..50_u32 {
        if kill == 10 {
            (first, before) = (resident(), handles());
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = whole * (kill * 16 + (random >> 60) as u32) / (50 * 16);
        let mut second = Second::start("client", &socket.path, 1);
        let dead = AtomicBool::new(false);
        let loads = subject.committed + subject.failed;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(moment);
                second.kill();
                dead.store(true, Ordering::Release);
            });
            if let Some(error) = subject.load_from(&socket, &dead) {
                assert_gone(&error);
            }
        });
        unconnected += usize::from(subject.committed + subject.failed == loads);
    }
    println!("{unconnected} before a load, {} in one, {} after", subject.failed, subject.committed - 2);
    assert!(subject.failed >= 5, "the moments are not spread over the transfer");
    subject.load_well(&socket);
    assert_eq!(handles(), before);
    let grown = resident() - first;
    assert!(grown < 2 << 20, "40 kills grew by {grown} bytes");
}

#[test]
fn c18_b62_a_trainer_killed_at_any_message_changes_nothing_and_leaves_nothing() {
    let _turn = my_turn();
    let socket = Socket::bind();
    let mut subject = Subject::new();
    // The trainer written after the documentation works, and tells how many moments it has.
    let mut second = Second::start("trainer", &socket.path, u64::MAX);
    assert!(subject.load_from(&socket, &AtomicBool::new(false)).is_none());
    let moments: u64 = second.says().unwrap().parse().unwrap();
    drop(second);
    assert!(moments > 15);
    let before = handles();
    for moment in 0..moments {
        let mut second = Second::start("trainer", &socket.path, moment);
        let dead = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(second.says().as_deref(), Some("stopped"));
                second.kill();
                dead.store(true, Ordering::Release);
            });
            if let Some(error) = subject.load_from(&socket, &dead) {
                assert_gone(&error);
            }
        });
    }
    // Only one that has sent everything may be gone and its weights committed.
    assert_eq!(subject.committed, 3, "after `sent`, and after the verdict");
    subject.load_well(&socket);
    assert_eq!(handles(), before);
}

#[test]
fn c18_a_trainer_that_stalls_ends_in_a_deadline() {
    let _turn = my_turn();
    let socket = Socket::bind();
    let mut subject = Subject::new();
    let deadline = Duration::from_millis(400);
    // Greeted, listed, in the transfer.
    for moment in [2, 3, 4, 6, 9] {
        let _second = Second::start("trainer", &socket.path, moment);
        let stream = socket.accept(&AtomicBool::new(false)).unwrap();
        let mut source = SharedMemorySource::accept(stream, options(deadline)).unwrap();
        let begin = Instant::now();
        let error = subject.load(|asleep| asleep.load_weights(&mut source)).unwrap();
        let SharedMemoryError::Deadline { waited, .. } = error else { panic!("{error}") };
        assert!(waited >= deadline && begin.elapsed() < PATIENT / 2);
    }
    subject.load_well(&socket);
}

#[test]
fn c18_an_engine_that_dies_is_an_error_for_the_trainer_at_once() {
    let _turn = my_turn();
    let before = handles();
    for moment in 0..ENGINE_MOMENTS {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("weights.socket");
        let mut second = Second::start("engine", &path, moment);
        let begin = Instant::now();
        let stream = loop {
            match UnixStream::connect(&path) {
                Ok(stream) => break stream,
                Err(fault) => assert!(begin.elapsed() < PATIENT, "{fault}"),
            }
            std::thread::sleep(Duration::from_micros(500));
        };
        let w2 = weights(2);
        std::thread::scope(|scope| {
            let trainer = scope.spawn(move || {
                let sent = SharedMemoryClient::over(stream, PATIENT)
                    .and_then(|mut client| client.send(&mut Slow(w2.source())));
                (sent, Instant::now())
            });
            assert_eq!(second.says().as_deref(), Some("stopped"), "{moment}");
            second.kill();
            let killed = Instant::now();
            let (sent, noticed) = trainer.join().unwrap();
            assert_gone(&sent.unwrap_err());
            assert!(noticed.saturating_duration_since(killed) < PATIENT / 4);
        });
    }
    assert_eq!(handles(), before);
}
