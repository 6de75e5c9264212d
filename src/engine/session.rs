//! Conversations of several turns.

use super::requests::{Owner, SessionTurn};
use super::{Awake, Engine, GenerateError};
use crate::completion::{FinishReason, RequestOutput};
use crate::request::{Request, RequestError, TokenId};
use crate::scheduler::PinId;

/// A conversation on an awake engine: the KV of its history is pinned between turns, whatever the prefix
/// cache evicts, unless a request could not run at all otherwise. It borrows the engine, so an engine with a
/// session alive cannot go to sleep:
///
/// ```compile_fail,E0505
/// # fn f(engine: dormouse::Engine<dormouse::Awake>) {
/// let session = engine.session();
/// engine.sleep(Default::default()); // cannot move out of `engine` because it is borrowed
/// drop(session);
/// # }
/// ```
///
/// Pinned blocks are not there for others while anything runs without them: drop sessions that are done. A
/// turn's tokens and logprobs are the bits that a single request with the whole history would give.
#[derive(Debug)]
pub struct Session<'e> {
    engine: &'e Engine<Awake>,
    history: Vec<TokenId>,
    pin: Option<PinId>,
}

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e Engine<Awake>) -> Self {
        Self { engine, history: Vec::new(), pin: None }
    }

    /// All tokens so far: prompts and completions.
    pub fn tokens(&self) -> &[TokenId] {
        &self.history
    }

    /// Runs one turn: `turn`'s prompt goes after the history, and what is generated is added to it. The
    /// output's prompt is the whole history up to there.
    ///
    /// # Errors
    /// As [`Engine::generate`]; [`RequestError::SessionSamples`] if the turn asks for more than one sample,
    /// [`RequestError::ResumePrompt`] if it carries an earlier output and there is a history already (an aborted
    /// turn is in the history: the next one, with an empty prompt, goes on from there).
    /// The history is then unchanged.
    pub fn generate(&mut self, turn: &Request) -> Result<RequestOutput, GenerateError> {
        let invalid = |source| GenerateError::Request { index: 0, source };
        let samples = turn.params.samples;
        if samples != 1 {
            return Err(invalid(RequestError::SessionSamples { samples }));
        }
        let prompt = [self.history.as_slice(), &turn.prompt].concat();
        if turn.resume.is_some() && !self.history.is_empty() {
            // What the turn carries continues its own prompt, not the history with it.
            let index = prompt.iter().zip(&turn.prompt).take_while(|(a, b)| a == b).count();
            return Err(invalid(RequestError::ResumePrompt { index }));
        }
        let request = Request { prompt, ..turn.clone() };
        let session = Some(SessionTurn { pinned: self.pin });
        let ids = self
            .engine
            .enqueue(vec![(request, session)], Owner::Caller)
            .map_err(|(_, error)| invalid(error))?;
        // From here on the turn owns the pin.
        self.pin = None;
        let ended = self.engine.wait(&ids)?.remove(0);
        self.pin = ended.pin;
        let completion = &ended.output.completions[0];
        if !matches!(completion.finish_reason, FinishReason::Error(_)) {
            self.history.clone_from(&ended.output.prompt);
            self.history.extend_from_slice(&completion.tokens);
        }
        Ok(ended.output)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if let Some(pin) = self.pin.take() {
            self.engine.unpin(pin);
        }
    }
}
