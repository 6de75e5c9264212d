//! Who leaves, is slow, is idle, or sends too much.

use std::time::Duration;

use dormouse::control::{ControllerOptions, Operation, PauseMode, WhileNotServing};
use serde_json::json;

use crate::client::{Connection, Server, Setup, choices};
use crate::server::http::Patience;

const COMPLETIONS: &str = "/v1/completions";

fn queueing() -> Setup<'static> {
    let mut options = ControllerOptions::default();
    options.while_not_serving = WhileNotServing::Queue;
    Setup { options, ..Setup::default() }
}

#[test]
fn b53_a_client_that_leaves_takes_its_request_along() {
    let server = Server::with(queueing());
    for path in [COMPLETIONS, "/generate"] {
        for stream in [false, true] {
            server.handle.run(Operation::Pause(PauseMode::Keep)).unwrap();
            // Accepted, and set aside until the resume: it doesn't end by itself.
            let prompt = if path == COMPLETIONS { "prompt" } else { "input_ids" };
            let body = json!({prompt: [[1, 2], [3]], "stream": stream}).to_string();
            let mut clients: Vec<Connection> = (0..3).map(|_| server.connect()).collect();
            clients.iter_mut().for_each(|client| client.send_post(path, body.as_bytes()));
            server.wait_live(6);
            drop(clients.pop());
            server.wait_live(4);
            drop(clients);
            server.wait_live(0);
            server.handle.run(Operation::Resume).unwrap();
            server.check();
        }
    }
}

#[test]
fn b53_a_client_that_leaves_in_the_middle_of_its_stream() {
    let server = Server::start();
    let body =
        json!({"prompt": [1], "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8}).to_string();
    let mut client = server.connect();
    client.send_post(COMPLETIONS, body.as_bytes());
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some());
    server.handle.run(Operation::Pause(PauseMode::Keep)).unwrap();
    let live = server.handle.status().live_requests;
    drop(client);
    server.wait_live(0);
    assert_eq!(live, 1, "8 samples of 500 tokens take longer than the way to the pause");
    server.handle.run(Operation::Resume).unwrap();
    server.check();
}

#[test]
fn bodies_that_are_too_long_are_not_read() {
    let server = Server::start();
    for path in [COMPLETIONS, "/v1/chat/completions", "/generate"] {
        // It says so: nothing more than this is sent.
        let mut connection = server.connect();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n{{\"prompt\": ");
        connection.send(head.as_bytes());
        let answer = connection.answer();
        assert_eq!((answer.status, answer.error()), (413, "the body is longer than 10485760 bytes".into()));
        assert!(connection.is_closed());
        // It doesn't: it ends soon after the limit.
        let mut connection = server.connect();
        connection.send(
            format!("POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes(),
        );
        let chunk = [&b"100000\r\n"[..], &vec![b' '; 1 << 20], b"\r\n"].concat();
        let taken = (0..100).take_while(|_| connection.try_send(&chunk)).count();
        assert!(taken < 60, "{taken} MiB were taken");
    }
    // The longest that is taken is no small thing.
    let body = format!("{{\"prompt\": [1], \"max_tokens\": 1{}}}", " ".repeat(10_400_000));
    let mut connection = server.connect();
    connection.send_post(COMPLETIONS, body.as_bytes());
    assert_eq!(connection.answer().status, 200);
    server.check();
}

#[test]
fn slow_clients_stop_nobody_and_are_given_up() {
    let soon = Duration::from_secs(1);
    let patience = Patience { head: soon, body: soon, ..Patience::default() };
    let server = Server::with(Setup { patience, ..Setup::default() });
    let slow = |says: &'static [u8]| {
        let mut client = server.connect();
        client.send(says);
        client
    };
    let mut heads: Vec<_> = (0..100).map(|_| slow(b"POST /v1/completions HT")).collect();
    let body = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\": [1";
    let mut bodies: Vec<_> = (0..100).map(|_| slow(body)).collect();
    (0..5).for_each(|_| server.check());
    for client in &mut bodies {
        let answer = client.answer();
        assert_eq!(
            (answer.status, answer.error()),
            (408, "the body stopped coming, or came too slowly".into())
        );
        assert!(client.is_closed());
    }
    assert!(heads.iter_mut().all(Connection::is_closed));
    server.check();
}

#[test]
fn a_client_that_does_not_read_is_given_up() {
    let patience = Patience { read: Duration::from_secs(1), ..Patience::default() };
    let server = Server::with(Setup { patience, ..Setup::default() });
    // Some 30 MB of answer: more than sockets hold.
    let body = json!({"prompt": [1], "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 32, "logprobs": 20});
    let mut client = server.connect();
    client.send_post(COMPLETIONS, body.to_string().as_bytes());
    server.wait_live(1);
    std::thread::sleep(Duration::from_millis(500));
    server.check();
    server.wait_live(0);
    server.check();
    drop(client);
}

/// Open files that this process may have.
fn open_files() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    line.split_whitespace().nth(3).and_then(|soft| soft.parse().ok()).unwrap_or(usize::MAX)
}

#[test]
fn idle_connections_stop_nobody() {
    let server = Server::start();
    // Both ends are in this process, and other tests run.
    let idle = 1000.min(open_files().saturating_sub(400) / 2);
    let mut connections: Vec<_> = (0..idle).map(|_| server.connect()).collect();
    server.check();
    let body = json!({"prompt": [1], "max_tokens": 3, "temperature": 0});
    let given =
        |connection: &mut Connection| choices(&[connection.post(COMPLETIONS, &body).json()]).remove(0).tokens;
    let expected = given(&mut server.connect());
    // Each of them is as good as new.
    connections.iter_mut().step_by(50).for_each(|connection| assert_eq!(given(connection), expected));
}

#[test]
fn connections_beyond_the_limit_wait() {
    let soon = Duration::from_millis(300);
    let patience = Patience { head: soon, connections: 8, ..Patience::default() };
    let server = Server::with(Setup { patience, ..Setup::default() });
    let idle: Vec<_> = (0..8).map(|_| server.connect()).collect();
    // Its turn comes when an idle one is given up.
    server.check();
    drop(idle);
}
