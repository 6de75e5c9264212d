//! What is ambiguous or means nothing is refused, and so is what comes from elsewhere.

use serde_json::json;

use crate::calls::{Expect, send};
use crate::host::{Server, Setup};
use crate::server::Options;

fn post(server: &Server, path: &str, body: &str) -> crate::calls::Answer {
    send(server.address, "POST", path, &[("Content-Type", "application/json")], body.as_bytes())
}

#[test]
fn an_argument_is_there_once_and_means_something() {
    let server = Server::start();
    let before = server.state();
    for body in [
        r#"{"level": 1, "level": 2}"#,
        r#"{"tags": ["weights"], "tags": null}"#,
        r#"{"update_info": {"a": 1, "a": 2}}"#,
        r#"{"tagz": null}"#,
        r#"{"request_id": "a", "control_id": "b"}"#,
        r#"{"timeout": 1}"#,
    ] {
        let path = if body.contains("timeout") { "/sleep?timeout=2" } else { "/sleep" };
        server.refused(&before, &post(&server, path, body), 400, "invalid_argument", None);
    }
    post(&server, "/pause", r#"{"mode": null, "tags": null, "timeout": null}"#).expect(200);
    server.post("/resume").expect(200);
}

#[test]
fn a_head_does_nothing() {
    let server = Server::start();
    for (path, allow) in [
        ("/clear_load_weight", "GET"),
        ("/update_model_weight", "GET"),
        ("/health_generate", "GET"),
        ("/flush_cache", "GET,POST"),
        ("/get_weights_by_name?name=model.norm.weight", "GET,POST"),
    ] {
        let mut connection = crate::client::Connection::to(server.address);
        connection.send(format!("HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let refused = connection.head();
        assert_eq!((refused.status, refused.header("allow")), (405, Some(allow)), "{path}");
    }
    assert_eq!(server.lifecycle(), "awake");
}

#[test]
fn pages_of_other_sites_control_nothing() {
    let call = |server: &Server, origin: &str| {
        let headers = [("Origin", origin), ("Authorization", "Bearer s3cret")];
        send(server.address, "POST", "/v1/pause", &headers, b"").status
    };
    let server = Server::start();
    let same = format!("http://{}", server.address);
    for origin in ["https://example.com", "null", "http://localhost.example.com", "http://10.0.0.1:8000"] {
        assert_eq!(call(&server, origin), 403, "{origin}");
    }
    assert_eq!(server.state()["paused"], false);
    for origin in ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8000", &same] {
        assert_eq!(call(&server, origin), 200, "{origin}");
    }
    let server = Server::with(Setup { token: Some("s3cret"), ..Setup::default() });
    assert_eq!(call(&server, "https://example.com"), 200, "a token is enough");
}

#[test]
fn sglangs_words_are_known_where_they_are_sglangs() {
    let server = Server::start();
    let info = server.get("/get_model_info").expect(200);
    assert_eq!((&info["model_path"], &info["is_generation"]), (&json!("tiny"), &json!(true)));
    let tags = json!({"tags": ["kv_cache", "cuda_graph"]});
    let released = server.post_json("/release_memory_occupation", &tags).expect(200);
    assert_eq!(released["state"]["lifecycle"], "weights loaded");
    server.post_json("/resume_memory_occupation", &tags).expect(200);
    server.post("/release_memory_occupation?tags=weights,cuda_graph").expect(200);
    server.post("/resume_memory_occupation").expect(200);
    assert_eq!(server.lifecycle(), "awake");
    let before = server.state();
    server.refused(&before, &server.post_json("/sleep", &tags), 400, "invalid_argument", None);
}

#[test]
fn what_is_no_file_is_no_checkpoint() {
    let server = Server::start();
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    let before = server.state();
    for name in ["directory", "device"] {
        std::fs::create_dir(server.path(name)).unwrap();
    }
    std::fs::create_dir(server.path("directory/model.safetensors")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", server.path("device/model.safetensors")).unwrap();
    for name in ["directory", "device"] {
        let refused = server.post_json("/update_weights", &json!({"model_path": server.path(name)}));
        server.refused(&before, &refused, 400, "invalid_argument", None);
    }
}

#[test]
fn infinite_weights_are_refused_if_the_call_says_so() {
    let server = Server::start();
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    let before = server.state();
    let mut bytes = server.new_bytes();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let octets = "application/octet-stream";
    let refused = server.post_bytes("/update_weights?require_finite=true", octets, &bytes);
    server.refused(&before, &refused, 400, "invalid_weights", None);
    server.post_bytes("/update_weights?require_finite=true", octets, &server.new_bytes()).expect(200);
    server.post_bytes("/update_weights", octets, &bytes).expect(200);
}

#[test]
fn options_that_would_let_nothing_or_everything_through_are_mistakes() {
    let parse = |args: &[&str]| Options::parse(args.iter().map(|arg| (*arg).to_owned()));
    for args in [
        ["--token", ""],
        ["--name", ""],
        ["--max-live-requests", "0"],
        ["--threads", "0"],
        ["--kv-blocks", "0"],
        ["--log", "loud"],
        ["--port", "x"],
        ["--nothing", "x"],
    ] {
        assert!(parse(&args).is_err(), "{args:?}");
        assert!(args[0] == "--nothing" || crate::help::TEXT.contains(args[0]), "{args:?} has help");
    }
    let root = parse(&["--weights-root", "/no/such/directory"]).unwrap();
    assert!(root.app().is_err_and(|error| error.to_string().contains("--weights-root")));
}
