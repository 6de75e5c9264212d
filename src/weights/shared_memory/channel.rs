//! Messages over a stream socket, each within a deadline.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::error::{ProtocolViolation, SharedMemoryError};
use super::message::{MAX_MESSAGE_BYTES, Message};
use crate::weights::json::cut;

/// Bytes of the length before each message.
const PREFIX_BYTES: usize = 4;
/// A message's buffer grows by this much when its bytes have come, not when they are announced.
const PIECE_BYTES: usize = 64 << 10;
/// Most messages that lie unread when the other side goes: two halves, the end, a last word.
const MAX_UNREAD: usize = 8;
/// Longest single call of `poll`; longer waits take several.
const LONGEST_POLL: Duration = Duration::from_secs(3600);

/// One end of the connection.
#[derive(Debug)]
pub(super) struct Channel {
    stream: UnixStream,
    deadline: Duration,
}

/// One wait: since when, until when, for what.
#[derive(Debug, Clone, Copy)]
struct Wait {
    begin: Instant,
    limit: Duration,
    waiting_for: &'static str,
}

impl Wait {
    /// Fails if the time is over and there is more to do: bytes that come one by one don't buy time.
    fn check_progress(&self, done: bool) -> Result<(), SharedMemoryError> {
        if done || self.begin.elapsed() <= self.limit { Ok(()) } else { Err(self.over()) }
    }

    fn over(&self) -> SharedMemoryError {
        SharedMemoryError::Deadline { waited: self.begin.elapsed(), waiting_for: self.waiting_for }
    }
}

impl Channel {
    pub(super) fn new(stream: UnixStream, deadline: Duration) -> Self {
        Self { stream, deadline }
    }

    /// The socket, for a test that sends what is no message.
    #[cfg(test)]
    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }

    fn wait(&self, waiting_for: &'static str) -> Wait {
        Wait { begin: Instant::now(), limit: self.deadline, waiting_for }
    }

    /// Sends a message; `waiting_for` is what the other side has to do for that.
    pub(super) fn send(&self, message: &impl Message) -> Result<(), SharedMemoryError> {
        self.send_bytes(&framed(message)?, None, self.wait("room for a message"))
    }

    /// Sends a message with a descriptor.
    pub(super) fn send_with(
        &self,
        message: &impl Message,
        descriptor: BorrowedFd<'_>,
    ) -> Result<(), SharedMemoryError> {
        self.send_bytes(&framed(message)?, Some(descriptor), self.wait("room for a message"))
    }

    /// Sends a message if there is room for it now; nobody hears whether it arrived.
    pub(super) fn send_last_word(&self, message: &impl Message) {
        let wait = Wait { limit: Duration::ZERO, ..self.wait("nothing") };
        let sent = framed(message).and_then(|bytes| self.send_bytes(&bytes, None, wait));
        if let Err(error) = sent {
            tracing::debug!(%error, "the other process was not told");
        }
    }

    /// Receives a message that carries no descriptor.
    pub(super) fn receive<M: Message>(
        &self,
        limit_bytes: usize,
        waiting_for: &'static str,
    ) -> Result<M, SharedMemoryError> {
        self.receive_within(limit_bytes, self.wait(waiting_for), &mut Vec::new(), 0)
    }

    /// Receives a message that may carry one descriptor.
    pub(super) fn receive_with<M: Message>(
        &self,
        waiting_for: &'static str,
    ) -> Result<(M, Option<OwnedFd>), SharedMemoryError> {
        let mut descriptors = Vec::new();
        let message = self.receive_within(MAX_MESSAGE_BYTES, self.wait(waiting_for), &mut descriptors, 1)?;
        Ok((message, descriptors.pop()))
    }

    /// What the other side said last, if it is gone and said why.
    pub(super) fn last_word<M: Message>(&self) -> Option<SharedMemoryError> {
        let wait = Wait { limit: Duration::ZERO, ..self.wait("a last word") };
        (0..MAX_UNREAD)
            .map_while(|_| self.receive_within::<M>(MAX_MESSAGE_BYTES, wait, &mut Vec::new(), 0).ok())
            .find_map(M::last_word)
    }

    /// Waits until something can be read, the end of the connection included; false if nothing can in time.
    pub(super) fn readable_within(&self, limit: Duration) -> Result<bool, SharedMemoryError> {
        match self.poll(PollFlags::IN, Wait { limit, ..self.wait("anything") }) {
            Ok(()) => Ok(true),
            Err(SharedMemoryError::Deadline { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn receive_within<M: Message>(
        &self,
        limit_bytes: usize,
        wait: Wait,
        descriptors: &mut Vec<OwnedFd>,
        expected: usize,
    ) -> Result<M, SharedMemoryError> {
        let mut prefix = [0; PREFIX_BYTES];
        self.receive_exact(&mut prefix, wait, descriptors, expected)?;
        let bytes = u32::from_le_bytes(prefix) as usize;
        let waiting_for = wait.waiting_for;
        if bytes > limit_bytes {
            return Err(ProtocolViolation::TooLong { bytes, limit_bytes, waiting_for }.into());
        }
        let mut text = Vec::new();
        while text.len() < bytes {
            let begin = text.len();
            text.resize(bytes.min(begin + PIECE_BYTES), 0);
            self.receive_exact(&mut text[begin..], wait, descriptors, expected)?;
        }
        serde_json::from_slice(&text).map_err(|fault| {
            let detail = cut(&fault.to_string()).into();
            ProtocolViolation::Malformed { waiting_for, detail }.into()
        })
    }

    fn receive_exact(
        &self,
        mut out: &mut [u8],
        wait: Wait,
        descriptors: &mut Vec<OwnedFd>,
        expected: usize,
    ) -> Result<(), SharedMemoryError> {
        while !out.is_empty() {
            match self.receive_some(out, descriptors) {
                Ok((0, _)) => return Err(SharedMemoryError::Gone { waiting_for: wait.waiting_for }),
                Ok((received, cut_off)) => {
                    // What was cut off is one that we had no room for.
                    let count = descriptors.len() + usize::from(cut_off);
                    if count > expected {
                        return Err(ProtocolViolation::Descriptors { received: count, expected }.into());
                    }
                    // There was room for the one that belongs here, but not among this process's open files.
                    if cut_off {
                        let operation = "receive a descriptor";
                        return Err(SharedMemoryError::Socket { operation, source: Errno::MFILE.into() });
                    }
                    out = &mut out[received..];
                    wait.check_progress(out.is_empty())?;
                }
                Err(errno) => self.go_on_after(errno, "receive", PollFlags::IN, wait)?,
            }
        }
        Ok(())
    }

    /// Receives bytes that are there; tells how many, and whether descriptors were cut off.
    fn receive_some(&self, out: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<(usize, bool), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(out)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                descriptors.extend(passed);
            }
        }
        Ok((received.bytes, received.flags.contains(ReturnFlags::CTRUNC)))
    }

    /// Sends all bytes, the descriptor with the first of them.
    fn send_bytes(
        &self,
        mut bytes: &[u8],
        mut descriptor: Option<BorrowedFd<'_>>,
        wait: Wait,
    ) -> Result<(), SharedMemoryError> {
        while !bytes.is_empty() {
            match self.send_some(bytes, descriptor) {
                Ok(sent) => {
                    descriptor = None;
                    bytes = &bytes[sent..];
                    wait.check_progress(bytes.is_empty())?;
                }
                Err(errno) => self.go_on_after(errno, "send", PollFlags::OUT, wait)?,
            }
        }
        Ok(())
    }

    /// Sends as many bytes as there is room for.
    fn send_some(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<usize, Errno> {
        // A peer that is gone is an error here and not a signal that ends the process.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(descriptor) = descriptor else {
            return rustix::net::send(&self.stream, bytes, flags);
        };
        let passed = [descriptor];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&passed)), "the space is for one descriptor");
        rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags)
    }

    /// Waits for what was missing, or says what is wrong.
    fn go_on_after(
        &self,
        errno: Errno,
        operation: &'static str,
        event: PollFlags,
        wait: Wait,
    ) -> Result<(), SharedMemoryError> {
        match errno {
            Errno::INTR => Ok(()),
            Errno::AGAIN => self.poll(event, wait),
            Errno::PIPE | Errno::CONNRESET => Err(SharedMemoryError::Gone { waiting_for: wait.waiting_for }),
            errno => Err(SharedMemoryError::Socket { operation, source: errno.into() }),
        }
    }

    fn poll(&self, event: PollFlags, wait: Wait) -> Result<(), SharedMemoryError> {
        loop {
            let left = wait.limit.saturating_sub(wait.begin.elapsed());
            let timeout = Timespec::try_from(left.min(LONGEST_POLL)).unwrap_or_default();
            match rustix::event::poll(&mut [PollFd::new(&self.stream, event)], Some(&timeout)) {
                Ok(0) if left.is_zero() => return Err(wait.over()),
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => {
                    return Err(SharedMemoryError::Socket { operation: "poll", source: errno.into() });
                }
            }
        }
    }
}

/// The message with its length before it.
fn framed(message: &impl Message) -> Result<Vec<u8>, SharedMemoryError> {
    let mut bytes = vec![0; PREFIX_BYTES];
    let unwritable = |source: std::io::Error| SharedMemoryError::Socket { operation: "encode", source };
    serde_json::to_writer(&mut bytes, message).map_err(|fault| unwritable(fault.into()))?;
    let limit_bytes = message.limit_bytes();
    let length = bytes.len() - PREFIX_BYTES;
    let prefix = u32::try_from(length).ok().filter(|_| length <= limit_bytes);
    let prefix = prefix.ok_or(SharedMemoryError::MessageTooLong { bytes: length, limit_bytes })?;
    bytes[..PREFIX_BYTES].copy_from_slice(&prefix.to_le_bytes());
    Ok(bytes)
}
