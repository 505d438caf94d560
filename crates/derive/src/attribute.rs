//! Attributes with arguments: `#[name(key = VALUE, other)]`.

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::parse::ParseStream;
use syn::{Attribute, Error, Result, Token};

/// The keys of an attribute with their values, each at most once. Only the keys in `bare` may stand
/// without a value, which is empty then.
pub(crate) fn arguments(attribute: &Attribute, bare: &[&str]) -> Result<Vec<(Ident, TokenStream)>> {
    attribute.parse_args_with(|input: ParseStream<'_>| {
        let mut arguments: Vec<(Ident, TokenStream)> = Vec::new();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            let value = value(&key, input, bare)?;
            if arguments.iter().any(|(earlier, _)| *earlier == key) {
                return Err(given_twice(&key));
            }
            arguments.push((key, value));
        }
        Ok(arguments)
    })
}

/// Reads the value of `key` and the comma after it.
fn value(key: &Ident, input: ParseStream<'_>, bare: &[&str]) -> Result<TokenStream> {
    let mut value = TokenStream::new();
    let has_value = input.parse::<Option<Token![=]>>()?.is_some();
    while !input.is_empty() && !is_end(input, bare) {
        value.extend([input.parse::<TokenTree>()?]);
    }
    input.parse::<Option<Token![,]>>()?;
    if value.is_empty() && (has_value || !bare.iter().any(|bare| key == bare)) {
        return Err(Error::new(key.span(), format!("`{key}` has no value: write `{key} = ..`")));
    }
    Ok(value)
}

/// Whether a value ends here: at a comma, unless it is a part of the value, as in `f::<A, B>()`.
fn is_end(input: ParseStream<'_>, bare: &[&str]) -> bool {
    let rest = input.fork();
    if !matches!(rest.parse::<Option<Token![,]>>(), Ok(Some(_))) {
        return false;
    }
    let Ok(key) = rest.parse::<Ident>() else { return rest.is_empty() };
    bare.iter().any(|bare| key == bare) || rest.peek(Token![=])
}

pub(crate) fn given_twice(key: &Ident) -> Error {
    Error::new(key.span(), format!("`{key}` is given twice"))
}
