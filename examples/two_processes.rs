//! Weights from another process: the trainer sends them through shared memory while the engine sleeps. This
//! program starts itself a second time as the trainer, or another one that speaks the protocol:
//!
//! `cargo run --release --example two_processes`
//!
//! `cargo run --release --example two_processes -- --trainer "python3 examples/trainer.py"`

use std::error::Error;
use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use dormouse::{
    Engine, Request, SharedMemoryClient, SharedMemoryOptions, SharedMemorySource, SleepOptions, TensorSet,
};
use safetensors::SafeTensors;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model");

fn main() -> Result<(), Box<dyn Error>> {
    let me = std::env::current_exe()?;
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [] => engine(Command::new(me).arg("--send-to")),
        [flag, command] if flag == "--trainer" => {
            let mut words = command.split_whitespace();
            engine(Command::new(words.next().ok_or("which trainer?")?).args(words))
        }
        [flag, socket] if flag == "--send-to" => trainer(Path::new(socket)),
        _ => Err("usage: two_processes [--trainer COMMAND]".into()),
    }
}

/// Holds the weights and sends them; any `WeightSource` will do.
fn trainer(socket: &Path) -> Result<(), Box<dyn Error>> {
    let file = std::fs::read(format!("{MODEL}/model.safetensors"))?;
    let trained = SafeTensors::deserialize(&file)?;
    let mut engine = SharedMemoryClient::connect(socket, Duration::from_secs(30))?;
    for update in 1..=2 {
        let version = engine.send(&mut TensorSet::new(trained.tensors()))?;
        println!("trainer {}: update {update} is version {version}", std::process::id());
    }
    Ok(())
}

/// Waits for the trainer to connect, or to end before it does.
fn accept(listener: &UnixListener, trainer: &mut Child) -> Result<UnixStream, Box<dyn Error>> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(status) = trainer.try_wait()? {
            return Err(format!("the trainer ended before it connected: {status}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn engine(trainer: &mut Command) -> Result<(), Box<dyn Error>> {
    let me = format!("engine {}", std::process::id());
    let socket = std::env::temp_dir().join(format!("dormouse-{}.socket", std::process::id()));
    let listener = UnixListener::bind(&socket)?;
    let mut trainer = trainer.arg(&socket).spawn()?;
    let stream = accept(&listener, &mut trainer)?;
    std::fs::remove_file(&socket)?;
    // Halves this small so that even this model takes several.
    let options = SharedMemoryOptions { half_bytes: 256 << 10, deadline: Duration::from_secs(30) };
    let mut source = SharedMemorySource::accept(stream, options)?;

    let mut engine = Engine::builder(MODEL).build()?;
    let request = Request::new(vec![1, 2, 3]).max_new_tokens(8).temperature(0.0);
    let first = engine.generate(std::slice::from_ref(&request))?;
    for _ in 0..2 {
        let asleep = engine.sleep_discarding(SleepOptions::default())?;
        println!("{me}: asleep, {} bytes held", asleep.memory().total_bytes());
        let loaded = match asleep.load_weights(&mut source) {
            Ok(loaded) => loaded,
            Err(failed) => {
                // The trainer learns why, unless it is the trainer that failed.
                let _ = source.refuse(&failed.error);
                return Err(failed.error.into());
            }
        };
        source.confirm(&loaded.report().version)?;
        let report = loaded.report();
        let gb_per_s = report.received_bytes as f64 / report.receiving.as_secs_f64() / 1e9;
        println!("{me}: {} bytes in {:?}, {gb_per_s:.2} GB/s", report.received_bytes, report.receiving);
        engine = loaded.wake_up()?;
        let output = engine.generate(std::slice::from_ref(&request))?;
        println!("{me}: version {}: {:?}", engine.version(), output[0].completions[0].tokens);
        assert_eq!(
            first[0].completions[0].logprobs, output[0].completions[0].logprobs,
            "the same weights, the same bits"
        );
    }
    assert!(trainer.wait()?.success(), "the trainer had its weights committed");
    Ok(())
}
