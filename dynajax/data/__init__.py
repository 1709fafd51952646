"""The data side: documents, packed rows and global batches, each a pure function of (corpus, seed, step)."""

from dynajax.data.batch import Batch as Batch
from dynajax.data.batch import Segment as Segment
from dynajax.data.batch import lay_out as lay_out
from dynajax.data.batch import pad_rows as pad_rows
from dynajax.data.batches import Batches as Batches
from dynajax.data.corpus import VOCAB_SIZE as VOCAB_SIZE
from dynajax.data.corpus import Documents as Documents
from dynajax.data.corpus import FileDocuments as FileDocuments
from dynajax.data.corpus import MemoryDocuments as MemoryDocuments
from dynajax.data.corpus import folder_documents as folder_documents
from dynajax.data.corpus import manifest_text as manifest_text
from dynajax.data.corpus import stdlib_documents as stdlib_documents
from dynajax.data.document_steps import DocumentBatch as DocumentBatch
from dynajax.data.document_steps import DocumentSteps as DocumentSteps
from dynajax.data.packing import Overlong as Overlong
from dynajax.data.stream import Cursor as Cursor
from dynajax.data.stream import Stream as Stream
