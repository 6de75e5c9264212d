//! The description and the routes agree.

use serde_json::Value;

use crate::calls::{Expect, send};
use crate::host::Server;

/// Every schema that is referred to is there.
fn check_references(document: &Value, at: &Value) {
    match at {
        Value::Object(fields) => {
            if let Some(name) = fields.get("$ref").and_then(Value::as_str) {
                let there = name.strip_prefix('#').and_then(|pointer| document.pointer(pointer));
                assert!(there.is_some(), "{name}");
            }
            fields.values().for_each(|value| check_references(document, value));
        }
        Value::Array(values) => values.iter().for_each(|value| check_references(document, value)),
        _ => {}
    }
}

#[test]
fn every_control_route_that_is_described_is_there_and_no_other_method() {
    let server = Server::start();
    let document = server.get("/openapi.json").expect(200);
    assert_eq!(document["openapi"], "3.1.0");
    check_references(&document, &document);
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() >= 38, "{}", paths.len());
    let mut ids: Vec<&Value> = Vec::new();
    for (path, methods) in paths {
        let methods = methods.as_object().unwrap();
        ids.extend(methods.values().map(|operation| &operation["operationId"]));
        let control = |operation: &Value| operation["tags"][0] == "control";
        if !methods.values().any(control) {
            continue;
        }
        let said = |answer: &crate::calls::Answer| {
            let mut allowed: Vec<_> =
                answer.header("allow").unwrap().split(',').map(str::to_ascii_lowercase).collect();
            allowed.retain(|method| method != "head");
            allowed.sort();
            allowed
        };
        let refused = send(server.address, "DELETE", path, &[], b"");
        assert_eq!(refused.status, 405, "{path}");
        let mut described: Vec<_> = methods.keys().cloned().collect();
        described.sort();
        assert_eq!(said(&refused), described, "{path}");
    }
    let all = ids.len();
    ids.sort_by_key(|id| id.to_string());
    ids.dedup();
    assert_eq!(ids.len(), all, "operations have names of their own");
}
