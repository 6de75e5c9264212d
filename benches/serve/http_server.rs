//! The example's server over an engine's handle, and clients that read streams from it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;

use dormouse::control::Handle;
use tokio::net::TcpListener;

use super::common::Outcome;
use crate::server::app::{App, Info};
use crate::server::http;

/// Serves on a port of the system's choice, as the example does, for as long as this process runs.
pub(crate) fn start(handle: &Handle, model: &Path) -> Outcome<SocketAddr> {
    let info = Info::open(model, "model")?;
    let app = App::new(handle.clone(), info);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    std::thread::spawn(move || runtime.block_on(http::serve(listener, app, std::future::pending())));
    Ok(address)
}

/// Streams a completion with logprobs and reads it to its end; returns how many tokens it had.
pub(crate) fn stream(address: SocketAddr, prompt: &[u32], tokens: usize) -> Outcome<usize> {
    let body = serde_json::json!({
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "logprobs": 0,
        "stream": true, "stream_options": {"include_usage": true},
    })
    .to_string();
    let mut socket = TcpStream::connect(address)?;
    write!(
        socket,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let count = answer
        .rsplit_once("\"completion_tokens\":")
        .map(|(_, rest)| rest.trim_start().chars().take_while(char::is_ascii_digit).collect::<String>());
    match count.and_then(|count| count.parse().ok()) {
        Some(count) if answer.contains("data: [DONE]") => Ok(count),
        _ => Err(format!("a stream without its end: {answer:.300}").into()),
    }
}
