//! What the kernel asks and hears, in its own structures, whichever way both take.
//!
//! A request is taken apart by [`request`], which copies out of it what outlives the memory that it came in,
//! and answered through a [`Ticket`], which knows the way back.

mod again;
mod answer;
mod request;
pub(crate) mod wire;

pub(crate) use answer::{Ticket, Way};
pub(crate) use request::{Call, Request, answer, forget, is_misled, take};
