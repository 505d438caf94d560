//! Macros of the crates `fault` and `settings`, which describe their attributes.

mod attribute;
mod fault;
mod settings;

use proc_macro::TokenStream;
use syn::{DeriveInput, Error, parse_macro_input};

/// See the crate `fault`.
#[proc_macro_derive(Fault, attributes(fault))]
pub fn fault(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    fault::expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// See the crate `settings`.
#[proc_macro_attribute]
pub fn section(_: TokenStream, item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as DeriveInput);
    settings::expand_section(item).unwrap_or_else(Error::into_compile_error).into()
}

/// For enums without fields, with serde's names: the values of a key, and the function `name`.
#[proc_macro_derive(Choice)]
pub fn choice(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    settings::expand_choice(&input).unwrap_or_else(Error::into_compile_error).into()
}
