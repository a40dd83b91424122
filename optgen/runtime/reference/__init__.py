"""The eager torch reference: a rule's text over the codecs of a plan."""
