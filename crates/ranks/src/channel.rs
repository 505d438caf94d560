//! Exchange of small messages between all ranks.

use super::DistError;
use serde::{Serialize, de::DeserializeOwned};

/// Exchanges small messages between all ranks, for one purpose and from one thread.
///
/// All ranks make the same calls in the same order.
pub trait Channel: Send {
    /// Returns the messages of all ranks, in the order of the ranks, after all have sent theirs.
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError>;

    /// Returns the message of rank 0 on every rank, for example the id of a communicator. The
    /// messages of other ranks are not used.
    fn message_of_first(&mut self, message: Vec<u8>) -> Result<Vec<u8>, DistError> {
        self.all_gather(message).map(|mut messages| messages.swap_remove(0))
    }

    /// Returns a function that closes the channel from any thread. A waiting and every later
    /// [`Self::all_gather`] of this rank then returns [`DistError::Closed`].
    fn closer(&self) -> Box<dyn Fn() + Send + Sync>;
}

/// [`Channel::all_gather`] for values, which arrive unchanged: also floats that are not finite.
///
/// The messages have no names of fields. So serde's `flatten`, `untagged`, `tag` and `default` fail
/// in `T`, and `skip_serializing_if` shifts the fields after it without an error. All ranks must run
/// the same build. serde refuses a path that is not UTF-8: send an `OsString`.
pub fn gather<T: Serialize + DeserializeOwned>(
    channel: &mut dyn Channel,
    value: &T,
) -> Result<Vec<T>, DistError> {
    let message = postcard::to_stdvec(value).expect("messages are plain values");
    let messages = channel.all_gather(message)?;
    let read = |(rank, message): (usize, Vec<u8>)| {
        let problem = match postcard::take_from_bytes(&message) {
            Ok((value, [])) => return Ok(value),
            Ok((_, rest)) => format!("it has {} more bytes than expected", rest.len()),
            Err(error) => format!("its message cannot be read: {error}"),
        };
        Err(DistError::Message { rank, problem })
    };
    messages.into_iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Two ranks with the same messages, of which this one changes that of rank 1.
    struct Two(fn(&mut Vec<u8>));

    impl Channel for Two {
        fn all_gather(&mut self, message: Vec<u8>) -> Result<Vec<Vec<u8>>, DistError> {
            let mut other = message.clone();
            self.0(&mut other);
            Ok(vec![message, other])
        }

        fn closer(&self) -> Box<dyn Fn() + Send + Sync> {
            Box::new(|| ())
        }
    }

    #[test]
    fn values_arrive_unchanged() {
        let payload = f64::from_bits(0x7ff8_0000_dead_beef);
        let floats = [f64::NAN, -f64::NAN, payload, f64::INFINITY, f64::NEG_INFINITY, -0.0, 5e-324];
        let singles = [f32::NAN, f32::INFINITY, -0.0, f32::MAX];
        let value = (floats, singles, u64::MAX, i64::MIN, Some("\u{732b}\0".to_owned()), [(); 0]);
        for (floats_2, singles_2, big, small, text, _) in gather(&mut Two(|_| ()), &value).unwrap()
        {
            assert_eq!(floats_2.map(f64::to_bits), floats.map(f64::to_bits));
            assert_eq!(singles_2.map(f32::to_bits), singles.map(f32::to_bits));
            assert_eq!((big, small, &text), (u64::MAX, i64::MIN, &value.4));
        }
        let map = BTreeMap::from([(3_usize, Err::<(), _>("no".to_owned())), (4, Ok(()))]);
        assert_eq!(gather(&mut Two(|_| ()), &map).unwrap(), [map.clone(), map]);
    }

    #[cfg(unix)]
    #[test]
    fn the_name_of_a_file_need_not_be_utf_8() {
        use std::ffi::OsString;
        use std::os::unix::ffi::OsStringExt;
        let name = OsString::from_vec(b"rows-\xff\xfe.jsonl".to_vec());
        assert_eq!(gather(&mut Two(|_| ()), &name).unwrap(), [name.clone(), name]);
    }

    #[test]
    fn a_message_of_another_form_is_an_error_that_names_the_rank() {
        let problem = |change: fn(&mut Vec<u8>)| {
            let error = gather(&mut Two(change), &(vec![1.5, 2.5], "a".to_owned())).unwrap_err();
            let DistError::Message { rank: 1, problem } = error else { panic!("{error}") };
            problem
        };
        assert_eq!(problem(|message| message.push(0)), "it has 1 more bytes than expected");
        let cut = problem(|message| message.truncate(9));
        assert!(cut.starts_with("its message cannot be read: "), "{cut}");
        let more = problem(|message| message[0] = 200);
        assert!(more.starts_with("its message cannot be read: "), "{more}");
    }
}
