//! A trainer written after the documentation of the protocol, with nothing of this crate: sockets, JSON and
//! `pwrite`, as a trainer in another language would.

use std::fs::File;
use std::io::{IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use serde_json::{Value, json};

use crate::Moments;
use crate::common::Weights;

fn send(stream: &mut UnixStream, message: &Value) {
    let text = message.to_string();
    let length = u32::try_from(text.len()).unwrap();
    stream.write_all(&[&length.to_le_bytes(), text.as_bytes()].concat()).unwrap();
}

fn receive(stream: &mut UnixStream) -> Value {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut text).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The descriptor comes with the first byte.
fn receive_welcome(stream: &mut UnixStream) -> (File, u64) {
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
    let mut pieces = [IoSliceMut::new(&mut length)];
    let received = rustix::net::recvmsg(&*stream, &mut pieces, &mut control, flags).unwrap();
    assert_eq!(received.bytes, 4);
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut passed) => passed.next(),
        _ => None,
    });
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut text).unwrap();
    let welcome: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(welcome["welcome"]["protocol"], 1);
    (File::from(file.unwrap()), welcome["welcome"]["half_bytes"].as_u64().unwrap())
}

/// Sends the weights, passing a moment before and after each message, and prints how many those were.
pub(crate) fn run(socket: &Path, weights: &Weights, moments: &mut Moments) {
    moments.pass();
    let mut stream = UnixStream::connect(socket).unwrap();
    moments.pass();
    let (memory, half_bytes) = receive_welcome(&mut stream);
    moments.pass();
    let tensors = weights.0.iter().map(|(name, tensor)| {
        let shape = &tensor.shape;
        json!({"name": name, "dtype": "F32", "shape": shape})
    });
    let tensors: Vec<Value> = tensors.collect();
    send(&mut stream, &json!({"index": {"tensors": tensors}}));
    moments.pass();
    loop {
        let message = receive(&mut stream);
        moments.pass();
        if let Some(want) = message.get("want") {
            let wanted = want["tensors"].as_array().unwrap().iter();
            let wanted = wanted.map(|tensor| &weights.0[tensor.as_u64().unwrap() as usize].1.data[..]);
            stream_halves(&mut stream, &memory, half_bytes, &wanted.collect::<Vec<_>>().concat(), moments);
        } else if message.get("finish").is_some() {
            send(&mut stream, &json!({"sent": {}}));
            moments.pass();
        } else {
            assert!(message.get("committed").is_some(), "{message}");
            println!("\n> {}", moments.passed);
            return;
        }
    }
}

fn stream_halves(
    stream: &mut UnixStream,
    memory: &File,
    half_bytes: u64,
    bytes: &[u8],
    moments: &mut Moments,
) {
    let mut untaken = 0;
    for (number, piece) in bytes.chunks(half_bytes as usize).enumerate() {
        if untaken == 2 {
            assert_eq!(receive(stream), json!({"taken": {"half": number % 2}}));
            untaken -= 1;
            moments.pass();
        }
        memory.write_all_at(piece, (number % 2) as u64 * half_bytes).unwrap();
        send(stream, &json!({"filled": {"half": number % 2, "bytes": piece.len()}}));
        untaken += 1;
        moments.pass();
    }
    for _ in 0..untaken {
        assert!(receive(stream).get("taken").is_some());
        moments.pass();
    }
}
