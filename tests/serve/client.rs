//! A small HTTP/1.1 client and a server to talk to, over real sockets.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use dormouse::control::{Controller, ControllerOptions, Handle};
use dormouse::{DType, EngineBuilder, KvCapacity, Request, RequestOutput};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::common::{self, Weights, awake, tiny_builder, tiny_weights};
use crate::server::app::{App, Info};
use crate::server::http::{self, Patience};

/// Longer than anything here takes.
pub const LONG: Duration = Duration::from_secs(60);

pub fn weights() -> Weights {
    tiny_weights(false, DType::F32, 1)
}

/// What the engine itself says, alone.
pub fn oracle(request: &Request) -> RequestOutput {
    common::fresh(&weights(), false, request)
}

/// A server of the tiny model that stops when it is dropped.
pub struct Server {
    pub address: SocketAddr,
    pub handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

pub struct Setup<'a> {
    pub directory: Option<&'a Path>,
    pub patience: Patience,
    pub options: ControllerOptions,
    pub drain: Duration,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        let (patience, options) = (Patience::default(), ControllerOptions::default());
        Self { directory: None, patience, options, drain: LONG }
    }
}

pub fn builder() -> EngineBuilder {
    tiny_builder(false, DType::F32).kv_cache(KvCapacity::Blocks(512))
}

impl Server {
    pub fn start() -> Self {
        Self::with(Setup::default())
    }

    pub fn with(setup: Setup<'_>) -> Self {
        let empty = tempfile::tempdir().unwrap();
        let mut info = Info::open(setup.directory.unwrap_or(empty.path()), "tiny").unwrap();
        info.patience = setup.patience;
        let handle = Controller::with(setup.options).drive(awake(builder(), &weights()));
        let app = App::new(handle.clone(), info);
        let (stop, stopped) = oneshot::channel();
        let (send_address, address) = std::sync::mpsc::channel();
        let for_drain = handle.clone();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                send_address.send(listener.local_addr().unwrap()).unwrap();
                let connections = http::serve(listener, app, async { drop(stopped.await) }).await;
                crate::server::drained(&for_drain, setup.drain, connections.shutdown()).await;
            });
        });
        let address = address.recv().unwrap();
        Self { address, handle, stop: Some(stop), thread: Some(thread) }
    }

    pub fn connect(&self) -> Connection {
        Connection::to(self.address)
    }

    /// One request on a connection of its own.
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.connect().post(path, body)
    }

    pub fn get(&self, path: &str) -> Answer {
        let mut connection = self.connect();
        connection.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
        connection.answer()
    }

    /// Checks that it still answers, and rightly.
    pub fn check(&self) {
        let answer =
            self.post("/v1/completions", &json!({"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4}));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let tokens =
            &oracle(&Request::new(vec![1, 2, 3]).temperature(0.0).max_new_tokens(4)).completions[0].tokens;
        assert_eq!(answer.json()["choices"][0]["token_ids"], json!(tokens));
    }

    /// Waits until so many requests are live.
    pub fn wait_live(&self, requests: usize) {
        wait_for(
            || self.handle.status().live_requests == requests,
            || format!("{requests} live requests: there are {}", self.handle.status().live_requests),
        );
    }

    /// Stops accepting, and waits for the end of all answers.
    pub fn stop(mut self) {
        self.stop_now();
    }

    /// Stops accepting.
    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    fn stop_now(&mut self) {
        self.begin_stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Whatever is in flight is not waited for.
            drop(self.handle.stop());
        }
        self.stop_now();
    }
}

pub fn wait_for(mut done: impl FnMut() -> bool, what: impl Fn() -> String) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < LONG, "{}", what());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A connection that may carry several requests.
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    pub fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    /// Sends what the other end may not want; whether it took it.
    pub fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.0.get_mut().write_all(bytes).is_ok()
    }

    pub fn send_post(&mut self, path: &str, body: &[u8]) {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(&[head.as_bytes(), body].concat());
    }

    pub fn post(&mut self, path: &str, body: &Value) -> Answer {
        self.send_post(path, body.to_string().as_bytes());
        self.answer()
    }

    /// Reads a head.
    pub fn head(&mut self) -> Answer {
        let mut answer = Answer { status: 0, headers: Vec::new(), body: Vec::new() };
        let status = self.line().expect("an answer");
        answer.status = status.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        while let Some((name, value)) = self.line().expect("a head").split_once(':') {
            answer.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        answer
    }

    pub fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                answer.body.extend_from_slice(&chunk);
            }
        } else if let Some(length) = answer.header("content-length") {
            answer.body = vec![0; length.parse().unwrap()];
            self.0.read_exact(&mut answer.body).unwrap();
        }
        answer
    }

    /// Reads a chunk of a chunked body; `None` after the last.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let length = usize::from_str_radix(&self.line()?, 16).expect("the length of a chunk");
        let mut chunk = vec![0; length + 2];
        self.0.read_exact(&mut chunk).unwrap();
        assert!(chunk.ends_with(b"\r\n"));
        chunk.truncate(length);
        (length > 0).then_some(chunk)
    }

    /// Whether the other end closes, without a byte more or with the rest of an answer.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        // A reset closes, too.
        self.0
            .read_to_end(&mut rest)
            .map_or_else(|error| error.kind() != std::io::ErrorKind::WouldBlock, |_| true)
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.0.read_line(&mut line).unwrap();
        (read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned())
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.text()))
    }

    /// What is wrong; all failures have the same shape.
    pub fn error(&self) -> String {
        let json = self.json();
        assert_eq!(self.header("content-type"), Some("application/json"));
        assert!(json["error"]["type"].is_string() && json["error"].get("param").is_some(), "{json}");
        json["error"]["message"].as_str().expect("a message").to_owned()
    }

    /// Events of a stream that ended well.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert!(self.header("content-type").unwrap().starts_with("text/event-stream"));
        let text = self.text();
        let text = text.strip_suffix("data: [DONE]\n\n").expect("an end");
        text.split_terminator("\n\n").map(event).collect()
    }
}

fn event(text: &str) -> Value {
    serde_json::from_str(text.strip_prefix("data: ").expect("data")).expect("JSON in UTF-8")
}

/// What one choice gave, from a whole answer or put together from a stream.
#[derive(Debug, Default, PartialEq, Clone)]
pub struct Given {
    pub text: String,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<u32>,
    pub finish: String,
}

/// Puts choices together: of one whole answer, or of a stream's events.
pub fn choices(events: &[Value]) -> Vec<Given> {
    let mut given: Vec<Given> = Vec::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().expect("choices")) {
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        given.resize_with(given.len().max(index + 1), Given::default);
        let one = &mut given[index];
        assert_eq!(one.finish, "", "nothing comes after the end");
        let text = ["/text", "/delta/content", "/message/content"].iter().find_map(|at| choice.pointer(at));
        one.text += text.and_then(Value::as_str).expect("a text");
        one.tokens.extend(ids(&choice["token_ids"]));
        let logprobs = &choice["logprobs"];
        match logprobs["content"].as_array() {
            Some(content) => one.logprobs.extend(content.iter().map(|token| bits(&token["logprob"]))),
            None => {
                one.logprobs.extend(logprobs["token_logprobs"].as_array().into_iter().flatten().map(bits));
            }
        }
        one.finish += choice["finish_reason"].as_str().unwrap_or_default();
    }
    given
}

pub fn ids(list: &Value) -> Vec<u32> {
    let id = |id: &Value| u32::try_from(id.as_u64().unwrap()).unwrap();
    list.as_array().into_iter().flatten().map(id).collect()
}

/// A logprob's bits: written shortest, it reads back the same.
#[allow(clippy::cast_possible_truncation, reason = "it was an f32")]
pub fn bits(logprob: &Value) -> u32 {
    (logprob.as_f64().expect("a number") as f32).to_bits()
}
