//! Bodies that come slowly, or not at all, keep nobody else waiting; what is refused unread is answered.

use std::time::{Duration, Instant};

use crate::calls::{Expect, send_raw};
use crate::client::Connection;
use crate::host::{Server, Setup};
use crate::http::Patience;

const OCTETS: &str = "application/octet-stream";

fn server(patience: Patience) -> Server {
    let server = Server::with(Setup { patience: Some(patience), ..Setup::default() });
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    server
}

/// The beginning of an upload.
fn begin(server: &Server, path: &str, length: usize) -> Connection {
    let mut connection = Connection::to(server.address);
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {OCTETS}\r\nContent-Length: {length}\r\n\r\nx"
    );
    connection.send(head.as_bytes());
    connection
}

#[test]
fn uploads_that_stand_still_end_and_others_wait_no_longer_than_they_say() {
    let (second, long) = (Duration::from_secs(1), Duration::from_secs(60));
    let patience = Patience { body: 4 * second, weights_turn: long, ..Patience::default() };
    let server = server(patience);
    let mut slow = [begin(&server, "/update_weights", 1000), begin(&server, "/update_weights", 1000)];
    std::thread::sleep(second / 2);
    let late = server.post_bytes("/update_weights?timeout=0.3", OCTETS, &server.new_bytes());
    assert_eq!(late.expect(504)["error"]["kind"], "deadline");
    let began = Instant::now();
    server.post_bytes("/update_weights", OCTETS, &server.new_bytes()).expect(200);
    assert!(began.elapsed() < long / 2, "it had its turn when a slow one was given up");
    for slow in &mut slow {
        assert_eq!(slow.answer().json()["error"]["kind"], "request_timeout");
    }
    let mut late = begin(&server, "/update_weights?timeout=0.3", 1000);
    assert_eq!(late.answer().expect(504)["error"]["kind"], "deadline");
}

#[test]
fn a_turn_is_not_waited_for_without_end() {
    let patience = Patience { weights_turn: Duration::from_millis(200), ..Patience::default() };
    let server = server(patience);
    let slow = [begin(&server, "/update_weights", 1000), begin(&server, "/update_weights", 1000)];
    std::thread::sleep(Duration::from_millis(500));
    let refused = server.post_bytes("/update_weights", OCTETS, &server.new_bytes());
    assert_eq!(refused.expect(503)["error"]["kind"], "overloaded");
    drop(slow);
}

#[test]
fn a_body_that_trickles_is_given_up() {
    let patience = Patience { body: Duration::from_secs(1), weights_rate: 1 << 20, ..Patience::default() };
    let server = server(patience);
    let mut trickle = begin(&server, "/update_weights", 100_000);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(20) && trickle.try_send(b"x") {
        std::thread::sleep(Duration::from_millis(100));
        if began.elapsed() > Duration::from_secs(3) {
            break;
        }
    }
    assert_eq!(trickle.answer().expect(408)["error"]["kind"], "request_timeout");
}

#[test]
fn a_body_that_can_only_be_refused_is_not_waited_for() {
    let server = Server::start();
    let before = server.state();
    let head = format!(
        "POST /update_weights HTTP/1.1\r\nHost: x\r\nContent-Type: {OCTETS}\r\nContent-Length: 9999\r\n\r\n"
    );
    let refused = send_raw(server.address, head.as_bytes());
    server.refused(&before, &refused, 409, "conflict", Some("/sleep?tags=kv_cache"));
}

#[test]
fn clients_that_send_all_before_they_read_get_their_answer() {
    let server = Server::start();
    for _ in 0..5 {
        let mut connection = Connection::to(server.address);
        let head = "POST /v1/sleep HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
            Content-Length: 6000000\r\n\r\n";
        connection.send(head.as_bytes());
        connection.send(&vec![b' '; 6_000_000]);
        assert_eq!(connection.answer().status, 413);
    }
}
