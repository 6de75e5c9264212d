//! A server with a tiny model, and what it must be like.

use std::net::SocketAddr;

use dormouse::control::{Controller, ControllerOptions, Generation, Handle, Reload};
use dormouse::{DType, Request, RequestOutput};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::app::{App, Info};
use crate::calls::{Answer, Expect, send};
use crate::common::{Weights, awake, bits, fresh, prompt, tiny_builder, tiny_weights};
use crate::http::{self, Patience};

/// A server on a port of its own. It is shut down with its runtime.
pub struct Server {
    pub address: SocketAddr,
    pub handle: Handle,
    /// Of the weights that it began with.
    pub old: Weights,
    /// Others, in `directory` beside the old ones.
    pub new: Weights,
    pub directory: TempDir,
    _runtime: tokio::runtime::Runtime,
}

/// How a server is set up.
#[derive(Default)]
pub struct Setup {
    pub token: Option<&'static str>,
    pub weights_root: bool,
    pub no_reload: bool,
    pub patience: Option<Patience>,
}

impl Server {
    pub fn start() -> Self {
        Self::with(Setup::default())
    }

    pub fn with(setup: Setup) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (old, new) = (tiny_weights(false, DType::F32, 1), tiny_weights(false, DType::F32, 2));
        for (name, weights) in [("old", &old), ("new", &new)] {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).expect("a directory");
            weights.save(&path.join("model.safetensors"));
        }
        let mut options = ControllerOptions::default();
        options.stream_buffer = 8;
        options.reload = (!setup.no_reload).then(|| Reload::checkpoint(directory.path().join("new")));
        let engine = awake(tiny_builder(false, DType::F32), &old);
        let handle = Controller::with(options).drive(engine);
        let root = setup.weights_root.then(|| directory.path().to_owned());
        let mut info = Info::open(&directory.path().join("old"), "tiny").expect("a directory without text");
        info.patience = setup.patience.unwrap_or_default();
        let mut app = App::new(handle.clone(), info);
        app.token = setup.token.map(Into::into);
        app.weights_root = root.map(Into::into);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let listener =
            runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port that is free");
        let address = listener.local_addr().expect("a bound address");
        runtime.spawn(http::serve(listener, app, std::future::pending()));
        Self { address, handle, old, new, directory, _runtime: runtime }
    }

    pub fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().expect("a path of text").to_owned()
    }

    /// The new weights as a file.
    pub fn new_bytes(&self) -> Vec<u8> {
        std::fs::read(self.directory.path().join("new/model.safetensors")).expect("a file")
    }

    /// As `curl -X POST` sends it.
    pub fn post(&self, path: &str) -> Answer {
        send(self.address, "POST", path, &[], b"")
    }

    pub fn get(&self, path: &str) -> Answer {
        send(self.address, "GET", path, &[], b"")
    }

    pub fn post_json(&self, path: &str, body: &Value) -> Answer {
        let headers = [("Content-Type", "application/json")];
        send(self.address, "POST", path, &headers, body.to_string().as_bytes())
    }

    pub fn post_bytes(&self, path: &str, kind: &str, body: &[u8]) -> Answer {
        send(self.address, "POST", path, &[("Content-Type", kind)], body)
    }

    /// What it says of its state.
    pub fn state(&self) -> Value {
        self.get("/status").expect(200)["state"].clone()
    }

    pub fn lifecycle(&self) -> String {
        self.state()["lifecycle"].as_str().expect("a text").to_owned()
    }

    /// A request that does not end by itself: nobody reads its tokens, and the server keeps few.
    pub fn long_request(&self) -> Generation {
        let request = Request::new(prompt(5, 3)).max_new_tokens(200).ignore_eos(true).stream(true);
        let mut generation = self.handle.submit(request).expect("it serves");
        generation.next_event();
        generation
    }

    fn generate(&self) -> RequestOutput {
        self.handle.submit(request()).expect("it serves").wait().expect("an output")
    }

    /// Its output is that of a fresh engine with these weights, bit for bit, with and without a cached prefix.
    #[track_caller]
    pub fn serves(&self, weights: &Weights) {
        let expected = bits(&fresh(weights, false, &request()));
        assert_eq!(bits(&self.generate()), expected);
        assert_eq!(bits(&self.generate()), expected);
        let Request { prompt, .. } = request();
        let body = json!({"prompt": prompt, "max_tokens": 16, "ignore_eos": true, "seed": 11});
        let answer = self.post_json("/v1/completions", &body).expect(200);
        assert_eq!(answer["choices"][0]["token_ids"], json!(expected[0].0));
    }

    /// An answer that refuses, and says everything about it. The state is as before.
    #[track_caller]
    pub fn refused(&self, before: &Value, answer: &Answer, status: u16, kind: &str, missing: Option<&str>) {
        let body = answer.expect(status);
        let error = &body["error"];
        assert_eq!(error["kind"], kind, "{body}");
        assert_eq!(error["missing_step"], json!(missing), "{body}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
        assert_eq!(error["retryable"].as_bool(), Some(is_retryable(kind)), "{body}");
        assert_eq!((&body["status"], &body["success"]), (&json!("error"), &json!(false)), "{body}");
        assert_eq!(answer.header("x-request-id"), error["request_id"].as_str(), "{body}");
        assert_eq!(answer.header("retry-after").is_some(), status == 503, "{answer:?}");
        assert_eq!(without_epoch(&error["state"]), without_epoch(before), "{body}");
        assert_eq!(without_epoch(&self.state()), without_epoch(before), "{body}");
    }
}

fn is_retryable(kind: &str) -> bool {
    ["requests_in_flight", "out_of_memory", "deadline", "overloaded", "not_serving"].contains(&kind)
}

/// A sleep that is refused may have closed admission for a moment.
pub fn without_epoch(state: &Value) -> Value {
    let mut state = state.clone();
    state.as_object_mut().expect("an object").remove("epoch").expect("an epoch");
    state
}

fn request() -> Request {
    Request::new(prompt(13, 5)).max_new_tokens(16).ignore_eos(true).seed(11)
}
