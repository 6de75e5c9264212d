//! Text in and out: half characters, stop strings, chat templates. The tokenizer is byte-level, over a vocabulary
//! of 64: most of what the tiny model says is letters, some is halves of characters.

use std::path::Path;

use dormouse::Request;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::{Server, Setup, choices, oracle};
use crate::server::chat::ChatTemplate;
use crate::server::text::{Detokenizer, StopStrings, Text};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// What each token spells; 0 is the end token.
fn spelling() -> Vec<Vec<u8>> {
    let mut spelling: Vec<Vec<u8>> = vec![b"<eos>".to_vec()];
    spelling.extend((b'a'..=b'z').map(|letter| vec![letter]));
    spelling.extend(b" .:\n0123456789".iter().map(|byte| vec![*byte]));
    // Parts of characters, and some that go over their edges.
    let parts: [&[u8]; 12] = [
        b"\xf0",
        b"\x9f",
        b"\x98",
        b"\x80",
        b"\xc3",
        b"\xa9",
        b"\xe5",
        b"\x8f",
        b"\xab",
        b"\xf0\x9f",
        b"\x80a",
        b"\xa9\xc3",
    ];
    spelling.extend(parts.map(<[u8]>::to_vec));
    spelling.extend([&b"ab"[..], b"the", b" the", b"stop", b"user", b"ing", b"\xc3\xa9"].map(<[u8]>::to_vec));
    spelling.extend((spelling.len()..64).map(|id| format!("<{id}>").into_bytes()));
    spelling
}

/// The characters by which byte-level tokenizers write bytes.
fn byte_level(bytes: &[u8]) -> String {
    let shown = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let character = |&byte: &u8| {
        let hidden = (0..byte).filter(|&other| !shown(other)).count();
        char::from_u32(if shown(byte) { byte.into() } else { 256 + u32::try_from(hidden).unwrap() }).unwrap()
    };
    bytes.iter().map(character).collect()
}

fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let spelling = spelling();
    let vocab: serde_json::Map<String, Value> =
        spelling.iter().enumerate().map(|(id, bytes)| (byte_level(bytes), json!(id))).collect();
    assert_eq!(vocab.len(), 64, "no token twice");
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": 0, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [["a", "b"]]},
    });
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    directory
}

fn server(directory: &Path) -> Server {
    Server::with(Setup { directory: Some(directory), ..Setup::default() })
}

fn spelled(tokens: &[u32]) -> String {
    let spelling = spelling();
    let bytes: Vec<u8> = tokens
        .iter()
        .filter(|&&token| token != 0)
        .flat_map(|&token| spelling[token as usize].clone())
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn text_grows_by_whole_characters_to_what_the_bytes_spell() {
    let directory = directory();
    let text = Text::open(directory.path()).unwrap().unwrap();
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from((state >> 33) % below).unwrap()
    };
    for round in 0..3000 {
        // Halves of characters only, or among letters.
        let (first, among) = if round % 2 == 0 { (40, 14) } else { (0, 64) };
        let tokens: Vec<u32> = (0..random(40)).map(|_| first + random(among)).collect();
        let (mut detokenizer, mut so_far) = (Detokenizer::new(true), String::new());
        for (index, &token) in tokens.iter().enumerate() {
            detokenizer.push(&text, token, &mut so_far);
            let now = spelled(&tokens[..=index]);
            assert!(now.starts_with(&so_far), "{tokens:?}: {so_far:?} of {now:?}");
            assert!(
                now.trim_end_matches('\u{fffd}').len() <= so_far.len(),
                "nothing certain waits: {tokens:?}"
            );
        }
        detokenizer.finish(&text, &mut so_far);
        assert_eq!(so_far, spelled(&tokens), "{tokens:?}");
    }
}

#[test]
fn stop_strings_are_found_whatever_the_pieces() {
    let stops = ["ab".to_owned(), "b c".to_owned(), "éé".to_owned()];
    let scan = |pieces: &[&str], keep: bool| {
        let (mut held, mut out) = (String::new(), String::new());
        for piece in pieces {
            held.push_str(piece);
            if let Some(stop) = StopStrings::new(&stops, keep).scan(&mut held, &mut out) {
                return (out, Some(stop));
            }
        }
        (out + &held, None)
    };
    assert_eq!(scan(&["x", "a", "b"], false), ("x".into(), Some(0)));
    assert_eq!(scan(&["x", "a", "b"], true), ("xab".into(), Some(0)));
    assert_eq!(scan(&["xab c"], false), ("x".into(), Some(0)), "the first place wins");
    assert_eq!(scan(&["b", " ", "d", "a"], false), ("b da".into(), None));
    assert_eq!(scan(&["b", " ", "cab"], false), (String::new(), Some(1)));
    assert_eq!(scan(&["é", "a", "éé"], false), ("éa".into(), Some(2)));
    assert_eq!(scan(&["aaa", "b"], false), ("aa".into(), Some(0)));
}

#[test]
fn texts_are_the_same_in_one_piece_and_in_many() {
    let directory = directory();
    let server = server(directory.path());
    for seed in 0..12 {
        // Halves of characters, mostly.
        let allowed: Vec<u32> = if seed % 2 == 0 { (36..64).collect() } else { (0..64).collect() };
        let mut body = json!({"prompt": "the ab", "seed": seed, "max_tokens": 60, "allowed_token_ids": allowed,
            "logprobs": 1, "temperature": 1.5});
        let whole = server.post(COMPLETIONS, &body).json();
        let prompt = vec![20, 8, 5, 27, 53];
        let request =
            Request::new(prompt).seed(seed).max_new_tokens(60).allowed_tokens(allowed).temperature(1.5);
        let given = choices(std::slice::from_ref(&whole));
        assert_eq!(given[0].tokens, oracle(&request).completions[0].tokens);
        assert_eq!(given[0].text, spelled(&given[0].tokens));
        body["stream"] = json!(true);
        assert_eq!(choices(&server.post(COMPLETIONS, &body).events()), given);
        let mut body = json!({"text": "the ab", "sampling_params": {"sampling_seed": seed, "max_new_tokens": 60,
            "temperature": 1.5}, "stream": true});
        let events = server.post("/generate", &body).events();
        body["stream"] = json!(false);
        assert_eq!(events.last().unwrap()["text"], server.post("/generate", &body).json()["text"]);
    }
}

#[test]
fn stop_strings_span_tokens() {
    let directory = directory();
    let server = server(directory.path());
    let mut stopped = 0;
    for seed in 0..10 {
        let body = json!({"prompt": "stop", "seed": seed, "max_tokens": 80, "ignore_eos": true, "n": 2, "logprobs": 0});
        let full = choices(&[server.post(COMPLETIONS, &body).json()]);
        let characters: Vec<char> = full[0].text.chars().collect();
        for (from, len) in [(0, 1), (5, 2), (20, 3), (33, 5), (60, 9)] {
            let Some(stop) = characters.get(from..from + len) else { continue };
            let stop: String = stop.iter().collect();
            if stop.contains('\u{fffd}') {
                continue;
            }
            let mut with = body.clone();
            with["stop"] = json!(["never in it", stop]);
            let given = choices(&[server.post(COMPLETIONS, &with).json()]);
            for (given, full) in given.iter().zip(&full) {
                match full.text.find(&stop) {
                    None => assert_eq!(given, full),
                    Some(at) => {
                        stopped += 1;
                        assert_eq!((given.text.as_str(), given.finish.as_str()), (&full.text[..at], "stop"));
                        let tokens = given.tokens.len();
                        assert_eq!(given.tokens, full.tokens[..tokens]);
                        assert_eq!(given.logprobs, full.logprobs[..tokens]);
                        assert!(spelled(&given.tokens).contains(&stop));
                        assert!(
                            !spelled(&given.tokens[..tokens - 1]).contains(&stop),
                            "the first that completes it"
                        );
                    }
                }
            }
            with["stream"] = json!(true);
            assert_eq!(choices(&server.post(COMPLETIONS, &with).events()), given, "{with}");
            with["include_stop_str_in_output"] = json!(true);
            let kept = choices(&server.post(COMPLETIONS, &with).events());
            assert!(
                full[0].text.find(&stop).is_none_or(|_| kept[0].text == format!("{}{stop}", given[0].text))
            );
        }
    }
    assert!(stopped >= 30, "{stopped}");
    server.wait_live(0);
}

#[test]
fn stop_strings_are_looked_for_after_the_minimum() {
    let directory = directory();
    let server = server(directory.path());
    let mut stopped = 0;
    for seed in 0..10 {
        let body =
            json!({"prompt": "stop", "seed": seed, "max_tokens": 80, "ignore_eos": true, "logprobs": 0});
        let full = choices(&[server.post(COMPLETIONS, &body).json()]).remove(0);
        let early = spelled(&full.tokens[..12]);
        if !full.text.starts_with(&early) {
            // Half a character.
            continue;
        }
        for stop in ["a", "e", "t", "o"].into_iter().filter(|stop| early.contains(*stop)) {
            let mut with = body.clone();
            (with["min_tokens"], with["stop"]) = (json!(12), json!(stop));
            let given = choices(&[server.post(COMPLETIONS, &with).json()]).remove(0);
            let end = full.text[early.len()..].find(stop).map(|at| early.len() + at);
            stopped += usize::from(end.is_some());
            assert_eq!(given.text, full.text[..end.unwrap_or(full.text.len())], "{stop}");
            with["stream"] = json!(true);
            assert_eq!(choices(&server.post(COMPLETIONS, &with).events()).remove(0), given);
        }
    }
    assert!(stopped >= 5, "{stopped}");
}

#[test]
fn texts_that_no_model_takes_are_not_encoded() {
    let directory = directory();
    let server = server(directory.path());
    let long = "the ab ".repeat(1_300_000);
    for (path, body) in [
        (COMPLETIONS, json!({"prompt": long})),
        (COMPLETIONS, json!({"prompt": ["a", long]})),
        ("/generate", json!({"text": long})),
        (CHAT, json!({"messages": [{"role": "user", "content": long}]})),
    ] {
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 400, "{path}");
        assert!(refused.error().contains("bytes of text are more than max_model_len 512 tokens"), "{path}");
    }
}

#[test]
fn a_stop_token_has_no_text() {
    let directory = directory();
    let server = server(directory.path());
    // One token that may be drawn, and it stops.
    let body = json!({"prompt": "a", "allowed_token_ids": [4], "stop_token_ids": [4], "min_tokens": 3, "max_tokens": 9,
        "stream": true});
    let mut body = body;
    let answer = server.post(COMPLETIONS, &body);
    // Before the third nothing may stop it, so nothing may be drawn.
    assert_eq!(choices(&answer.events())[0].finish, "error");
    body["min_tokens"] = json!(0);
    let given = choices(&server.post(COMPLETIONS, &body).events()).remove(0);
    assert_eq!((given.text.as_str(), given.tokens, given.finish.as_str()), ("", vec![4], "stop"));
    body["min_tokens"] = json!(3);
    body["stream"] = json!(false);
    let answer = server.post(COMPLETIONS, &body);
    assert_eq!(answer.status, 400, "the request's own restrictions: {}", answer.text());
}

#[test]
fn chats_go_through_the_models_template() {
    let directory = directory();
    let template = [
        "{%- for message in messages %}\n    {% if message.role == 'bad' %}{{ raise_exception('no such role') }}",
        "{% endif %}\n{{ message.role + ':' }}{{ message.content.strip() }}\n{% endfor %}",
        "{% if add_generation_prompt %}{{ 'ing:' }}{% endif %}{{ extra }}",
    ];
    let template = template.concat();
    let named = json!([{"name": "default", "template": template}]);
    let config = json!({"chat_template": named, "eos_token": {"content": "<eos>"}});
    std::fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let server = server(directory.path());
    let mut body = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": " the ab"}]}],
        "seed": 5, "max_completion_tokens": 12, "logprobs": true, "top_logprobs": 2, "return_token_ids": true,
        "chat_template_kwargs": {"extra": "z"}});
    let whole = server.post(CHAT, &body).json();
    let prompt: Vec<u32> = serde_json::from_value(whole["choices"][0]["prompt_token_ids"].clone()).unwrap();
    assert_eq!(spelled(&prompt), "user:the ab\ning:z");
    let given = choices(std::slice::from_ref(&whole));
    let expected = &oracle(&Request::new(prompt).seed(5).max_new_tokens(12)).completions[0];
    assert_eq!((&given[0].tokens, &given[0].text), (&expected.tokens, &spelled(&expected.tokens)));
    let logprobs: Vec<u32> = expected.logprobs.iter().map(|logprob| logprob.to_bits()).collect();
    assert_eq!(given[0].logprobs, logprobs);
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    body["stream"] = json!(true);
    let events = server.post(CHAT, &body).events();
    assert_eq!(choices(&events), given);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let answer = server.post(CHAT, &json!({"messages": [{"role": "bad", "content": "x"}]}));
    assert_eq!((answer.status, answer.error()), (400, "the chat template refuses: no such role".into()));
    // Without a limit there is as much as fits.
    let answer = server
        .post(CHAT, &json!({"messages": [{"role": "user", "content": "a"}], "ignore_eos": true}))
        .json();
    assert_eq!(answer["usage"]["total_tokens"], 512);
}

#[test]
fn templates_are_rendered_as_hugging_face_does() {
    let directory = tempfile::tempdir().unwrap();
    let render = |template: &str, messages: Value| {
        std::fs::write(directory.path().join("chat_template.jinja"), template).unwrap();
        let template = ChatTemplate::open(directory.path()).unwrap();
        template.render(messages.as_array().unwrap(), &json!({"messages": "never", "more": 1}), true)
    };
    let call = json!([{"role": "x", "content": "<a> & 'b'", "tool_calls": [{"a": 1, "b": [1, "é"]}]}]);
    assert_eq!(
        render("{{ messages[0].tool_calls[0] | tojson }}", call.clone()).unwrap(),
        r#"{"a": 1, "b": [1, "é"]}"#
    );
    assert_eq!(render("{{ messages[0].content }}{{ more }}", call.clone()).unwrap(), "<a> & 'b'1");
    let loops = [
        "{% for m in messages %}\n  {% if not loop.index0 %}\nx\n",
        "  {% continue %}\n  {% endif %}\n{% endfor %}\n",
    ];
    assert_eq!(render(&loops.concat(), call).unwrap(), "x\n");
    let default = tempfile::tempdir().unwrap();
    let template = ChatTemplate::open(default.path()).unwrap();
    let messages = [json!({"role": "system", "content": "a"}), json!({"role": "user", "content": "b"})];
    assert_eq!(template.render(&messages, &Value::Null, true).unwrap(), "ab");
    assert!(!template.is_own());
}
