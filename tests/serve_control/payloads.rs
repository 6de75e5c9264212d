//! B35 and B19: what comes as weights and is none leaves everything as it is.

use std::io::Write;
use std::net::TcpStream;

use dormouse::BucketWriter;
use serde_json::json;

use crate::calls::{Expect, send, send_raw};
use crate::common::Weights;
use crate::host::{Server, Setup};

const OCTETS: &str = "application/octet-stream";

/// Weights as buckets of at most so many bytes of data.
pub fn buckets(weights: &Weights, bytes: usize) -> Vec<Vec<u8>> {
    let mut buckets = Vec::new();
    let mut each = |bucket| {
        buckets.push(bucket);
        Ok(())
    };
    BucketWriter::new(bytes).write(&mut weights.source(), &mut each).expect("tensors that fit");
    buckets
}

/// A server that waits for weights beside the old ones.
fn ready() -> Server {
    let server = Server::start();
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    server
}

/// The old weights are there, and serve.
fn unharmed(server: &Server) {
    assert_eq!(server.state()["version"]["counter"], 1);
    server.post("/v1/wakeup").expect(200);
    server.serves(&server.old);
}

#[test]
fn b35_formats_that_can_run_code_are_refused_by_name() {
    let server = ready();
    let before = server.state();
    let pickle = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.";
    let bodies: [&[u8]; 5] = [
        pickle,
        b"PK\x03\x04\x00\x00archive/data.pkl",
        b"gASVCwAAAAAAAACMBXBvc2l4lC4=",
        b"UEsDBAAA",
        b"\x80\x02.",
    ];
    for path in ["/update_weights", "/v1/update_weights", "/update_weights_from_tensor"] {
        for body in bodies {
            let refused = server.post_bytes(path, OCTETS, body);
            assert!(refused.json()["message"].as_str().unwrap().contains("pickle"), "{refused:?}");
            server.refused(&before, &refused, 415, "unsupported_media_type", None);
        }
        for kind in
            ["application/x-pickle", "application/zip", "text/plain", "multipart/form-data; boundary=x"]
        {
            let refused = server.post_bytes(path, kind, &server.new_bytes());
            server.refused(&before, &refused, 415, "unsupported_media_type", None);
        }
        let body = json!({"serialized_named_tensors": ["gASVCwAAAAAAAACMBXBvc2l4lC4="]});
        server.refused(&before, &server.post_json(path, &body), 415, "unsupported_media_type", None);
    }
    // What `curl --data-binary` says its body is.
    let form = "application/x-www-form-urlencoded";
    let refused = server.post_bytes("/update_weights", form, &server.new_bytes());
    server.refused(&before, &refused, 415, "unsupported_media_type", None);
    let headers = [("Content-Type", OCTETS), ("Content-Encoding", "gzip")];
    let refused = send(server.address, "POST", "/update_weights", &headers, &server.new_bytes());
    server.refused(&before, &refused, 415, "unsupported_media_type", None);
    unharmed(&server);
}

#[test]
fn b35_garbage_and_truncated_weights_change_nothing() {
    let server = ready();
    let before = server.state();
    let (file, bucket) = (server.new_bytes(), buckets(&server.new, 1 << 20).remove(0));
    let header = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let mut bodies: Vec<Vec<u8>> =
        vec![b"x".to_vec(), b"garbage".to_vec(), vec![0xff; 1000], b"DORMOUSE".to_vec()];
    for whole in [&file, &bucket] {
        for length in [9, 24, 8 + header / 2, 8 + header, whole.len() / 2, whole.len() - 1] {
            bodies.push(whole[..length].to_vec());
        }
        bodies.push([whole, &b"x"[..]].concat());
    }
    // A length that would be gigabytes.
    bodies.push([&0xffff_fff0_u64.to_le_bytes(), &b"{}"[..]].concat());
    bodies.push([&b"DORMOUSE\x01\x00\x00\x00\x02\x00\x00\x00"[..], &[0xff; 8], b"{}"].concat());
    bodies.push(file.iter().copied().take(8 + header).chain(vec![0; 3]).collect());
    for body in bodies {
        for path in ["/update_weights", "/update_weights_from_tensor"] {
            let refused = server.post_bytes(path, OCTETS, &body);
            server.refused(&before, &refused, 400, "invalid_weights", None);
        }
    }
    let (missing, others) = server.new.0.split_last().unwrap();
    let incomplete = buckets(&Weights(others.to_vec()), 1 << 20).remove(0);
    let refused = server.post_bytes("/update_weights", OCTETS, &incomplete);
    assert!(refused.json()["message"].as_str().unwrap().contains(&missing.0), "{refused:?}");
    server.refused(&before, &refused, 400, "invalid_weights", None);
    for (kind, body) in [("application/x-dormouse-bucket", &file), ("application/x-safetensors", &bucket)] {
        server.refused(
            &before,
            &server.post_bytes("/update_weights", kind, body),
            400,
            "invalid_weights",
            None,
        );
    }
    unharmed(&server);
}

#[test]
fn bodies_are_read_before_anything_is_changed_and_only_so_far() {
    let server = ready();
    let before = server.state();
    let model: usize = server.new.0.iter().map(|(_, tensor)| tensor.data.len()).sum();
    let limit = model * 4 + (16 << 20);
    let head = |length: usize| {
        format!(
            "POST /update_weights HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {OCTETS}\r\n\
             Content-Length: {length}\r\n\r\n"
        )
    };
    // Refused by its length alone: nothing follows.
    let refused = send_raw(server.address, head(limit + 1).as_bytes());
    server.refused(&before, &refused, 413, "payload_too_large", None);
    let refused = server.post_bytes("/update_weights", OCTETS, &vec![0; limit]);
    server.refused(&before, &refused, 400, "invalid_weights", None);
    let long = format!("{{\"tags\": \"{}\"}}", "x".repeat(1 << 20));
    let refused = server.post_bytes("/v1/sleep", "application/json", long.as_bytes());
    server.refused(&before, &refused, 413, "payload_too_large", None);
    // A length that is not said.
    let chunked =
        "POST /v1/sleep HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunks = format!("{chunked}{:x}\r\n{long}\r\n0\r\n\r\n", long.len());
    let refused = send_raw(server.address, chunks.as_bytes());
    server.refused(&before, &refused, 413, "payload_too_large", None);
    // A connection that breaks off half-way is nothing but that.
    let bytes = server.new_bytes();
    let half = [head(bytes.len()).as_bytes(), &bytes[..bytes.len() / 2]].concat();
    let mut connection = TcpStream::connect(server.address).unwrap();
    connection.write_all(&half).unwrap();
    drop(connection);
    server.post("/v1/resume").expect(200);
    assert_eq!(server.state(), before);
    unharmed(&server);
}

#[test]
fn both_formats_are_taken_at_every_path() {
    let server = Server::start();
    let (file, bucket) = (server.new_bytes(), buckets(&server.new, 1 << 20).remove(0));
    let calls = [
        ("/update_weights", OCTETS, &file),
        ("/update_weights", "application/x-safetensors", &file),
        ("/update_weights", "application/x-dormouse-bucket", &bucket),
        ("/v1/update_weights?version=a", OCTETS, &bucket),
        ("/update_weights_from_tensor?load_format=flattened_bucket&flush_cache=false", OCTETS, &bucket),
        ("/update_weights_from_tensor?weight_version=b", "application/octet-stream; x=y", &file),
    ];
    for (counter, (path, kind, body)) in (2..).zip(calls) {
        server.post("/v1/sleep?tags=kv_cache").expect(200);
        let updated = server.post_bytes(path, kind, body).expect(200);
        assert_eq!(updated["state"]["version"]["counter"], counter);
        server.post("/v1/wakeup").expect(200);
        server.serves(&server.new);
    }
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    let untyped = send(server.address, "POST", "/update_weights", &[], &file);
    untyped.expect(200);
    let old = json!({"model_path": server.path("old"), "names": ["model.norm.weight"], "in_place": true});
    // The directory has more than the update may bring.
    let refused = server.post_json("/update_weights", &old);
    assert_eq!(refused.status, 400, "{refused:?}");
}

#[test]
fn b19_a_path_that_is_nothing_is_refused_and_touches_nothing() {
    let server = ready();
    let before = server.state();
    std::fs::write(server.path("file"), b"x").unwrap();
    std::fs::create_dir(server.path("empty")).unwrap();
    std::fs::create_dir(server.path("broken")).unwrap();
    std::fs::write(server.path("broken/model.safetensors"), b"x").unwrap();
    let calls = [
        (server.path("nowhere"), 404, "not_found"),
        (server.path("empty"), 404, "not_found"),
        (server.path("file"), 400, "invalid_argument"),
        (server.path("file/x"), 400, "invalid_argument"),
        (server.path("broken"), 400, "invalid_weights"),
        (String::new(), 400, "invalid_argument"),
        ("\0".to_owned(), 400, "invalid_argument"),
        ("x".repeat(5000), 400, "invalid_argument"),
        ("x".repeat(300), 400, "invalid_argument"),
    ];
    for (path, status, kind) in calls {
        for call in ["/v1/update_weights", "/update_weights", "/update_weights_from_disk"] {
            let refused = server.post_json(call, &json!({"model_path": path}));
            server.refused(&before, &refused, status, kind, None);
        }
    }
    unharmed(&server);
}

#[test]
fn weights_come_from_below_the_root_only() {
    let server = Server::with(Setup { weights_root: true, ..Setup::default() });
    server.post("/v1/sleep?tags=kv_cache").expect(200);
    let before = server.state();
    let outside = tempfile::tempdir().unwrap();
    server.new.save(&outside.path().join("model.safetensors"));
    std::os::unix::fs::symlink(outside.path(), server.path("link")).unwrap();
    let outside = outside.path().to_str().unwrap();
    let parent = format!("{}/../new", server.path("old"));
    for path in [outside, "/", "/nowhere", "..", "../x", &server.path("link"), "link", &parent] {
        let refused = server.post_json("/update_weights", &json!({"model_path": path}));
        server.refused(&before, &refused, 400, "invalid_argument", None);
    }
    server.post_json("/update_weights", &json!({"model_path": server.path("new")})).expect(200);
    server.post_json("/update_weights", &json!({"model_path": "new"})).expect(200);
    server.post("/v1/wakeup").expect(200);
    server.serves(&server.new);
}
