//! A server: OpenAI's endpoints and SGLang's `/generate` in front of one engine, and its control in the dialects of
//! FastDeploy, LMDeploy, vLLM and SGLang; `/openapi.json` describes it all.
//!
//! ```sh
//! cargo run --release --example serve                       # the small model of this repository, port 8000
//! cargo run --release --example serve -- --model DIR --port 0
//! curl localhost:8000/v1/completions -H 'content-type: application/json' \
//!     -d '{"prompt": "47+38=(", "max_tokens": 8, "temperature": 0, "logprobs": 1}'
//! ```
//!
//! `--help` lists the options. It prints `listening on http://...` when it serves, and logs to stderr; SIGINT and
//! SIGTERM let requests run to their end, for as long as `--drain-seconds` says, and exit with 0.

pub(crate) mod app;
pub(crate) mod bodies;
pub(crate) mod chat;
pub(crate) mod control;
pub(crate) mod control_answer;
pub(crate) mod control_args;
pub(crate) mod control_call;
pub(crate) mod control_weights;
pub(crate) mod edge;
pub(crate) mod error;
pub(crate) mod fastdeploy;
pub(crate) mod flow;
pub(crate) mod groups;
pub(crate) mod help;
pub(crate) mod http;
pub(crate) mod lmdeploy;
pub(crate) mod log;
pub(crate) mod openai;
pub(crate) mod openapi;
pub(crate) mod openapi_control;
pub(crate) mod openapi_generation;
pub(crate) mod payload;
pub(crate) mod sglang_control;
pub(crate) mod sglang_generate;
pub(crate) mod text;
pub(crate) mod updates;
pub(crate) mod vllm;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dormouse::control::{
    AbortTarget, ControlRequest, Controller, ControllerOptions, Handle, Operation, PauseDeadline, PauseMode,
    Reload,
};
use dormouse::{AnyEngine, Engine, KvCapacity};
use futures_util::future::select;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::{App, Info};

/// How long answers may take to be read once the requests have ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    if std::env::args().skip(1).any(|arg| arg == "--help" || arg == "-h") {
        print!("{}", help::TEXT);
        return ExitCode::SUCCESS;
    }
    let served = Options::parse(std::env::args().skip(1)).and_then(|options| run(&options));
    let Err(error) = served else { return ExitCode::SUCCESS };
    eprintln!("serve: {error}");
    ExitCode::FAILURE
}

pub(crate) struct Options {
    model: PathBuf,
    name: Option<String>,
    host: String,
    port: u16,
    token: Option<String>,
    weights_root: Option<PathBuf>,
    threads: Option<usize>,
    #[cfg(feature = "cuda")]
    gpu: Option<u32>,
    kv_blocks: Option<usize>,
    max_live_requests: Option<usize>,
    drain_seconds: u32,
    log: tracing::Level,
    asleep: bool,
}

impl Options {
    pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/examples/model").into(),
            name: None,
            host: "127.0.0.1".into(),
            port: 8000,
            token: None,
            weights_root: None,
            threads: None,
            #[cfg(feature = "cuda")]
            gpu: None,
            kv_blocks: None,
            max_live_requests: None,
            drain_seconds: 10,
            log: tracing::Level::INFO,
            asleep: false,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--model" => options.model = value()?.into(),
                "--name" => options.name = Some(some(&arg, value()?)?),
                "--host" => options.host = value()?,
                "--port" => options.port = number(&arg, &value()?)?,
                "--token" => options.token = Some(some(&arg, value()?)?),
                "--weights-root" => options.weights_root = Some(value()?.into()),
                "--threads" => options.threads = Some(above_0(&arg, &value()?)?),
                #[cfg(feature = "cuda")]
                "--cuda" => options.gpu = Some(number(&arg, &value()?)?),
                "--kv-blocks" => options.kv_blocks = Some(above_0(&arg, &value()?)?),
                "--max-live-requests" => options.max_live_requests = Some(above_0(&arg, &value()?)?),
                "--log" => options.log = log::level(&value()?)?,
                "--drain-seconds" => options.drain_seconds = number(&arg, &value()?)?,
                "--asleep" => options.asleep = true,
                _ => return Err(format!("unknown option {arg}; --help lists them").into()),
            }
        }
        Ok(options)
    }

    fn engine(&self) -> Result<AnyEngine, Box<dyn Error>> {
        let mut builder = Engine::builder(&self.model);
        if let Some(threads) = self.threads {
            builder = builder.threads(threads);
        }
        #[cfg(feature = "cuda")]
        if let Some(ordinal) = self.gpu {
            builder = builder.cuda(ordinal);
        }
        if let Some(blocks) = self.kv_blocks {
            builder = builder.kv_cache(KvCapacity::Blocks(blocks));
        }
        Ok(if self.asleep { builder.build_asleep()?.into() } else { builder.build()?.into() })
    }

    pub(crate) fn app(&self) -> Result<App, Box<dyn Error>> {
        let name = self.name.clone().or_else(|| {
            let directory = self.model.canonicalize().ok()?;
            Some(directory.file_name()?.to_string_lossy().into_owned())
        });
        let info = Info::open(&self.model, name.unwrap_or_else(|| "model".into()))?;
        let mut controller = ControllerOptions::default();
        openai::set(&mut controller.max_live_requests, self.max_live_requests);
        controller.reload = Some(Reload::checkpoint(&self.model));
        // Once: what the path means does not change when a link does.
        let root = self.weights_root.as_deref().map(weights_root).transpose()?;
        let mut app = App::new(Controller::with(controller).drive(self.engine()?), info);
        app.token = self.token.as_deref().map(Arc::from);
        app.weights_root = root.map(Arc::new);
        Ok(app)
    }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{name} needs a number, not {text:?}"))
}

/// Limits that would let nothing through are mistakes.
fn above_0(name: &str, text: &str) -> Result<usize, String> {
    match number(name, text)? {
        0 => Err(format!("{name} must be above 0")),
        number => Ok(number),
    }
}

/// A token that is empty, as an unset variable is, would be no secret.
fn some(name: &str, text: String) -> Result<String, String> {
    if text.is_empty() { Err(format!("{name} must not be empty")) } else { Ok(text) }
}

fn weights_root(path: &Path) -> Result<PathBuf, String> {
    let root = path.canonicalize().map_err(|error| format!("--weights-root {}: {error}", path.display()))?;
    if root.is_dir() { Ok(root) } else { Err(format!("--weights-root {}: no directory", path.display())) }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    log::install(options.log);
    let app = options.app()?;
    let handle = app.handle.clone();
    // The engine has threads of its own: these only move bytes.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind((options.host.as_str(), options.port)).await?;
        println!("listening on http://{}", listener.local_addr()?);
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut stop = async || {
            select(pin!(interrupt.recv()), pin!(terminate.recv())).await;
        };
        let connections = http::serve(listener, app, stop()).await;
        let drain = Duration::from_secs(options.drain_seconds.into());
        // A second signal does not wait.
        let _ = select(pin!(drained(&handle, drain, connections.shutdown())), pin!(stop())).await;
        Ok::<(), Box<dyn Error>>(())
    })?;
    runtime.shutdown_background();
    // An error: it has stopped before.
    drop(handle.stop());
    Ok(())
}

/// Accepts no more requests, lets those in flight run to their end or ends them when `drain` is over, and waits for
/// their answers to be read.
pub(crate) async fn drained(handle: &Handle, drain: Duration, answers: impl Future<Output = ()>) {
    let settled = async {
        let pause = Operation::Pause(PauseMode::Wait { on_deadline: PauseDeadline::Abort });
        handle.control(ControlRequest::new(pause).deadline(drain)).await;
        // An engine that was paused before has requests that don't run.
        handle.control(Operation::Abort(AbortTarget::All)).await;
    };
    let answers = tokio::time::timeout(drain + LAST_WORDS, answers);
    let _ = futures_util::future::join(settled, answers).await;
}
