//! What the server writes to its log.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;

use crate::calls::Expect;
use crate::host::Server;
use crate::log;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn control_requests_are_logged_at_their_receipt_and_their_outcome() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = log::subscriber(log::level("info").unwrap(), move || writer.clone());
    // Of the whole process: the controller has threads of its own.
    tracing::subscriber::set_global_default(subscriber).expect("no other test sets one");
    let server = Server::start();
    server.post("/v1/sleep?request_id=logged-sleep").expect(200);
    server.post("/wakeup?tags=draft&request_id=logged-mistake").expect(400);
    server.post("/update_weights?model_path=/&request_id=logged-refusal");
    // A token that stops, and must not: nothing may be drawn.
    server.post("/wakeup").expect(200);
    let body = json!({"prompt": [1], "allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 3});
    server.post_json("/v1/completions", &body).expect(400);
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let of = |id: &str| text.lines().filter(|line| line.contains(id)).collect::<Vec<_>>();
    let slept = of("logged-sleep");
    assert!(slept.iter().any(|line| line.contains("INFO") && line.contains("received")), "{slept:?}");
    assert!(slept.iter().any(|line| line.contains("done") && line.contains("state_after")), "{slept:?}");
    assert!(of("logged-mistake").iter().any(|line| line.contains("invalid_argument")), "{text}");
    assert!(!of("logged-refusal").is_empty(), "{text}");
    assert!(of("a generation failed").iter().all(|line| line.contains("WARN")), "{text}");
    assert_eq!(of("a generation failed").len(), 1, "{text}");
    assert!(!text.contains('\u{1b}'), "no colours");
    assert!(log::level("loud").is_err());
}
