//! A trainer in another process: this program once more.

use std::cell::RefCell;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use dormouse::{
    SharedMemoryClient, SharedMemoryError, SharedMemoryOptions, SharedMemorySource, Update, WeightVersion,
};

use super::common::Outcome;
use super::model::Model;

/// The flag that makes this program a trainer.
pub(crate) const FLAG: &str = "--trainer-of";

const DEADLINE: Duration = Duration::from_secs(60);

/// A process that sends the model whenever an update takes from it.
pub(crate) struct Trainer {
    process: Child,
    source: RefCell<SharedMemorySource>,
}

impl Trainer {
    pub(crate) fn start(model: &Model) -> Outcome<Self> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket)?;
        let process =
            Command::new(std::env::current_exe()?).arg(FLAG).arg(&model.directory).arg(&socket).spawn()?;
        let (stream, _) = listener.accept()?;
        let options = SharedMemoryOptions { deadline: DEADLINE, ..SharedMemoryOptions::default() };
        Ok(Self { process, source: RefCell::new(SharedMemorySource::accept(stream, options)?) })
    }

    pub(crate) fn push(&self, update: &mut Update<'_>) -> Outcome {
        Ok(update.push_all(&mut *self.source.borrow_mut())?)
    }

    pub(crate) fn confirm(&self, version: &WeightVersion) -> Outcome {
        Ok(self.source.borrow_mut().confirm(version)?)
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // It would end by itself when the connection does.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The trainer's side: sends the checkpoint, from memory, until nobody wants it any more.
pub(crate) fn train(directory: &Path, socket: &Path) -> Outcome {
    let model = Model::open(Some(directory))?;
    let mut engine = SharedMemoryClient::connect(socket, DEADLINE)?;
    loop {
        match engine.send(&mut model.set()) {
            Ok(_) => {}
            Err(SharedMemoryError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
