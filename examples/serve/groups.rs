//! Names that stand for all requests of one call.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use dormouse::RequestId;

use crate::app::App;

/// The calls in flight that were given one name for several prompts, by that name.
#[derive(Default)]
pub struct Groups(Mutex<HashMap<String, HashSet<RequestId>>>);

impl Groups {
    /// The requests that a name stands for.
    pub fn members(&self, name: &str) -> Vec<RequestId> {
        self.with(|groups| groups.get(name).into_iter().flatten().copied().collect())
    }

    fn with<T>(&self, work: impl FnOnce(&mut HashMap<String, HashSet<RequestId>>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A call's requests under its name, while it lasts.
pub struct Group {
    groups: Arc<Groups>,
    name: Option<String>,
    members: Vec<RequestId>,
}

impl Group {
    /// Begins a group; without a name it is none.
    pub fn new(app: &App, name: Option<String>) -> Self {
        Self { groups: Arc::clone(&app.groups), name, members: Vec::new() }
    }

    /// Adds a request.
    pub fn add(&mut self, request: RequestId) {
        let Some(name) = &self.name else { return };
        self.members.push(request);
        self.groups.with(|groups| groups.entry(name.clone()).or_default().insert(request));
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(name) = &self.name else { return };
        self.groups.with(|groups| {
            // Another call may have the same name.
            let Some(members) = groups.get_mut(name) else { return };
            for request in &self.members {
                members.remove(request);
            }
            if members.is_empty() {
                groups.remove(name);
            }
        });
    }
}
