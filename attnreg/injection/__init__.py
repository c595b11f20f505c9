"""The injection layer: applies the masks of any provider to the attention of any model."""

from attnreg.errors import CoverageWarning as CoverageWarning
from attnreg.errors import NoAttentionError as NoAttentionError
from attnreg.injection.attachment import attach as attach
from attnreg.injection.attachment import detach as detach
from attnreg.injection.attachment import handle_of as handle_of
from attnreg.injection.attachment import is_attached as is_attached
from attnreg.injection.attachment import seeded as seeded
from attnreg.injection.discovery import Discovery as Discovery
from attnreg.injection.discovery import LeftOut as LeftOut
from attnreg.injection.discovery import ModelSite as ModelSite
from attnreg.injection.discovery import discover as discover
from attnreg.injection.discovery.snapshot import draws_repeated as draws_repeated
from attnreg.injection.discovery.snapshot import evaluated as evaluated
from attnreg.injection.discovery.snapshot import put_back as put_back
from attnreg.injection.discovery.snapshot import undisturbed as undisturbed
from attnreg.injection.handle import AttachHandle as AttachHandle
