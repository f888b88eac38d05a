//! Round trips, and blobs that are damaged, cut, swapped or made up.

mod damage;
mod quantised;
mod round_trip;
