//! Calls as `curl` sends them, one connection each.

use std::net::SocketAddr;

use serde_json::Value;

pub use crate::client::Answer;
use crate::client::Connection;

/// Sends a request as it is.
pub fn send_raw(address: SocketAddr, request: &[u8]) -> Answer {
    let mut connection = Connection::to(address);
    // A server that refuses a body by its head may not take all of it.
    connection.try_send(request);
    connection.answer()
}

/// Sends a request with headers and a body.
pub fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let mut request = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() || method == "POST" {
        request += &format!("Content-Length: {}\r\n", body.len());
    }
    request += "\r\n";
    send_raw(address, &[request.as_bytes(), body].concat())
}

/// The JSON of an answer.
pub trait Expect {
    /// It must have this status.
    fn expect(&self, status: u16) -> Value;
}

impl Expect for Answer {
    #[track_caller]
    fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        self.json()
    }
}
