//! What callers bring can't hurt the controller: wakers, sources and subscribers that panic or call back.
//! What it says of itself stays true meanwhile.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod common;
#[allow(dead_code, reason = "this binary uses a part")]
#[path = "control/support.rs"]
mod support;

#[path = "control_callers/carried.rs"]
mod carried;
#[path = "control_callers/figures.rs"]
mod figures;
#[path = "control_callers/sources.rs"]
mod sources;
#[path = "control_callers/subscriber.rs"]
mod subscriber;
#[path = "control_callers/waiting.rs"]
mod waiting;
#[path = "control_callers/wakers.rs"]
mod wakers;
